"""Several texts for one prompt: a session for each, all opened or none, one stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence

from common.errors import CapacityError, InternalFaultError
from common.tokenizer import Tokenizer
from gateway.relay import Relay
from gateway.session import Session
from gateway.spans import RequestSpans
from gateway.types import (
    Choice,
    Delta,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Progress,
    Started,
)

RETRY_SECONDS = 1.0
SessionEvent = Progress | Delta | Finished


def open_choices(
    relay: Relay,
    requests: Sequence[GenerationRequest],
    max_live: int,
    arrived_at: float,
    spans: RequestSpans | None,
) -> list[Session]:
    """A session for each choice, the later ones forks of the first, which alone is traced.

    Whoever opens them closes them. Raises `CapacityError` if not all of them fit, or what
    `Relay.open` raises; nothing is open then.
    """
    room = max_live - relay.num_live()
    if len(requests) > max(1, room):  # of a single one the relay itself says so
        raise CapacityError(
            f"{len(requests)} choices are asked for, {max(0, room)} of the {max_live} requests"
            " that this gateway serves at a time are free",
            retry_after_seconds=RETRY_SECONDS,
        )
    first = relay.open(requests[0], arrived_at, spans)
    sessions = [first]
    try:
        for request in requests[1:]:
            sessions.append(relay.open(request, arrived_at, fork_of=first))  # noqa: PERF401
    except BaseException:
        for session in sessions:
            relay.close(session)
        raise
    return sessions


async def events_of(
    sessions: Sequence[Session], tokenizer: Tokenizer
) -> AsyncGenerator[SessionEvent, None]:
    """The events of all sessions until each has finished; the first error ends all.

    Fair: before a session's next event comes one of every other that has any. Of each, one
    event at most is taken ahead of the client. Progress is told of the first session only.
    """
    if len(sessions) == 1:
        async with contextlib.aclosing(sessions[0].events(tokenizer)) as only:
            async for event in only:
                yield event
        return
    streams = [session.events(tokenizer) for session in sessions]
    waits = {i: asyncio.ensure_future(anext(stream)) for i, stream in enumerate(streams)}
    try:
        while waits:
            await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
            for i in [i for i, wait in waits.items() if wait.done()]:
                event = waits.pop(i).result()
                if not isinstance(event, Finished):
                    waits[i] = asyncio.ensure_future(anext(streams[i]))
                if i == 0 or not isinstance(event, Progress):
                    yield event
    finally:
        for wait in waits.values():
            wait.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def gathered(events: Iterable[Event]) -> Generation:
    """The whole texts, out of the events of a request that has come to its end."""
    started: Started | None = None
    deltas: dict[int, list[Delta]] = {}
    choices: list[Choice] = []
    for event in events:
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Delta):
            deltas.setdefault(event.index, []).append(event)
        elif isinstance(event, Finished):
            choices.append(_choice(event, deltas.get(event.index, [])))
    if started is None or len(choices) != started.n:
        raise InternalFaultError("the text has no end")
    return Generation(started, tuple(sorted(choices, key=lambda choice: choice.index)))


def _choice(finished: Finished, deltas: list[Delta]) -> Choice:
    return Choice(
        index=finished.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        origins=tuple(origin for delta in deltas for origin in delta.origins),
        finished=finished,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs),
    )
