"""Long streams that run side by side through real processes, and what each of them must give.

Greedy and `COUPLED`, drafted and not. Identity is to the token; float32 may part at a near-tie,
none has been seen, and one would show as a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from common.errors import TandemError
from common.types import FinishReason
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Client, Delta, Finished, Options
from gateway.types import PeerState

NUM_STREAMS, NUM_TOKENS, PROMPT_LEN = 8, 200, 24
Disturb = Callable[[LocalStack], Awaitable[None]]


@dataclass
class Heard:
    """What a client got, piece by piece."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    error: TandemError | None = None
    ended_at: float = 0.0  # monotonic

    def kinds(self) -> set[str]:
        """Of findings that the gateway explains it by."""
        assert self.finished is not None
        assert self.finished.explanation is not None
        return {finding.kind for finding in self.finished.explanation.findings}


def is_drafted(i: int) -> bool:
    return i // 2 % 2 == 0


def asked(i: int) -> tuple[list[int], Options]:
    """Stream i's prompt, which repeats itself so that drafts find something, and its options."""
    prompt = [2 + (7 * i + j) % 40 for j in range(PROMPT_LEN // 2)] * 2
    temperature = 0.0 if i // 4 == 0 else 1.0
    return prompt, Options(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        temperature=temperature,
        seed=100 + i,
        speculate=is_drafted(i),
        explain=True,
    )


async def listen(client: AsyncClient, i: int, heard: Heard, speculate: bool) -> None:
    prompt, options = asked(i)
    options = replace(options, speculate=speculate and options.speculate)
    try:
        async for event in client.stream(prompt, options):
            if isinstance(event, Delta):
                heard.token_ids += event.token_ids
                heard.text += event.text
            elif isinstance(event, Finished):
                heard.finished = event
    except TandemError as error:
        heard.error = error
    heard.ended_at = time.monotonic()


def run(
    stack: LocalStack,
    disturb: Disturb | None = None,
    *,
    speculate: bool = True,
    num_streams: int = NUM_STREAMS,
) -> list[Heard]:
    """All streams at once; `disturb` is called when each of them has had some tokens."""
    all_heard = [Heard() for _ in range(num_streams)]

    async def main() -> None:
        async with AsyncClient(stack.gateway_address) as client:
            streams = [
                asyncio.create_task(listen(client, i, heard, speculate))
                for i, heard in enumerate(all_heard)
            ]
            if disturb is not None:
                async with asyncio.timeout(60):
                    while min(len(h.token_ids) for h in all_heard) < 5:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                assert not any(heard.finished for heard in all_heard)
                await disturb(stack)
            await asyncio.gather(*streams)

    asyncio.run(main())
    return all_heard


def wait_until_all_ready(stack: LocalStack) -> None:
    """Every target and draft is connected."""
    deadline = time.monotonic() + 60
    with Client(stack.gateway_address) as client:
        while any(peer.state is not PeerState.READY for peer in client.status().peers):
            assert time.monotonic() < deadline, client.status()
            time.sleep(0.05)


def assert_same(heard: list[Heard], expected: list[Heard]) -> None:
    """No stream fails; no token differs, is lost or comes twice."""
    assert [h.error for h in heard] == [None] * len(expected)
    assert [h.token_ids for h in heard] == [h.token_ids for h in expected]
    assert [h.text for h in heard] == [h.text for h in expected]
    for h in heard:
        assert h.finished is not None
        assert h.finished.reason is FinishReason.LENGTH
        usage = h.finished.usage
        assert (usage.prompt, usage.discarded) == (PROMPT_LEN, 0)
        assert usage.delivered == len(h.token_ids) == NUM_TOKENS
