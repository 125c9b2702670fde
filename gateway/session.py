"""One request on its way through a target and, if there is one, a draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from common.errors import AbandonedError, InternalFaultError, TandemError, error_for
from common.tokenizer import Tokenizer
from common.types import (
    ChainId,
    Commit,
    FinishReason,
    OpenSequence,
    Proposal,
    Verdict,
)
from common.types import Progress as SequenceProgress
from gateway.peer import Peer
from gateway.text import TextStream
from gateway.types import (
    Delta,
    Finished,
    GenerationRequest,
    GenerationTiming,
    Progress,
    SpeculationFigures,
    Usage,
)

QueueItem = Verdict | SequenceProgress | TandemError


@dataclass
class Tally:
    """The sums over a sequence's verdicts and proposals."""

    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    stale: int = 0
    undrafted_steps: int = 0
    cached: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps_seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self.stale += verdict.num_stale
        self.cached = max(self.cached, verdict.num_cached)
        self.queue_seconds += verdict.timing.queue_seconds
        self.prefill_seconds += verdict.timing.prefill_seconds
        self.steps_seconds += verdict.timing.step_seconds
        if not verdict.token_ids:
            return
        self.steps += 1
        self.tested += verdict.num_tested
        self.accepted += verdict.num_accepted
        self.undrafted_steps += verdict.num_tested == 0
        missing = verdict.num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(verdict.num_accepted):
            self.accepted_per_position[position] += 1

    def figures(self) -> SpeculationFigures:
        """What clients are told of drafting."""
        return SpeculationFigures(
            steps=self.steps,
            drafted=self.drafted,
            tested=self.tested,
            accepted=self.accepted,
            accepted_per_position=tuple(self.accepted_per_position),
            stale=self.stale,
            undrafted_steps=self.undrafted_steps,
        )


class Session:
    """The state of one request; belongs to the event loop's thread.

    The methods `take_*` and `fail` are called by the relay and never wait for the client,
    which reads `events`.
    """

    QUEUE_MARGIN = 4  # verdicts bring a token each, so only a broken target overflows

    def __init__(
        self,
        request: GenerationRequest,
        target: Peer[Session],
        target_id: int,
        arrived_at: float,
    ) -> None:
        self.request = request
        self.committed = list(request.prompt)
        self._target = target
        self._target_id = target_id
        self._draft: Peer[Session] | None = None
        self._draft_id = 0  # also the epoch of the draft's chains
        self._lookahead = request.lookahead
        self._ended = False  # nothing more comes from the target
        self._tally = Tally()
        self._arrived_at = arrived_at  # monotonic
        self._first_token_at: float | None = None
        self._queue: asyncio.Queue[QueueItem] = asyncio.Queue()
        target.open(self, self._opening(target_id))

    @property
    def wants_draft(self) -> bool:
        """Whether a draft would be of use now."""
        return self.request.lookahead > 0 and not self._ended and self._draft is None

    def attach(self, draft: Peer[Session], draft_id: int) -> None:
        """Let a draft guess from here on; draft_id is new and larger than any before."""
        self._draft, self._draft_id = draft, draft_id
        draft.open(self, self._opening(draft_id))

    def detach(self) -> None:
        """Go on undrafted."""
        if self._draft is not None:
            self._draft.close(self._draft_id)
            self._draft = None

    def close(self) -> None:
        """Nothing more is wanted from target and draft; may be called again."""
        self._ended = True
        self._target.close(self._target_id)
        self.detach()

    def fail(self, error: TandemError) -> None:
        """End with an error, after what has been decided already."""
        self.close()
        self._queue.put_nowait(error)

    def take_proposal(self, proposal: Proposal) -> None:
        """Pass a draft's guess on, under the target's name for this sequence."""
        if self._ended:
            return
        self._tally.drafted += len(proposal.token_ids)
        self._target.send(
            Proposal(
                sequence_id=self._target_id,
                chain_id=ChainId(self._draft_id, proposal.chain_id.serial),
                base_len=proposal.base_len,
                start=proposal.start,
                token_ids=proposal.token_ids,
                distributions=proposal.distributions,
            )
        )

    def take_progress(self, progress: SequenceProgress) -> None:
        """Tell the client how its request gets on, if it has nothing else to read."""
        if self._queue.empty():
            self._queue.put_nowait(progress)

    def take_verdict(self, verdict: Verdict) -> None:
        """Keep what the target decided, tell the draft at once and the client in time."""
        if verdict.error is not None:
            error = verdict.error
            self.fail(error_for(error.code, error.message, error.field, error.retry_after_seconds))
            return
        if verdict.committed_len != len(self.committed):
            self.fail(
                InternalFaultError(
                    f"the target's verdict begins at {verdict.committed_len},"
                    f" not at {len(self.committed)}"
                )
            )
            return
        self._tally.add(verdict)
        if verdict.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self.committed.extend(verdict.token_ids)
        self._lookahead = min(verdict.lookahead, self.request.lookahead)
        if verdict.finish_reason is not None:
            self.close()
        elif self._draft is not None:
            self._draft.send(
                Commit(self._draft_id, verdict.committed_len, verdict.token_ids, self._lookahead)
            )
        if self._queue.qsize() > self.request.sampling.max_tokens + self.QUEUE_MARGIN:
            self._queue = asyncio.Queue()
            self.fail(AbandonedError("the client does not read"))
            return
        self._queue.put_nowait(verdict)

    async def events(
        self, tokenizer: Tokenizer
    ) -> AsyncGenerator[Progress | Delta | Finished, None]:
        """What the client hears after `Started`; raises `TandemError` if the request fails."""
        text = TextStream(tokenizer, self.request.prompt, self.request.stop_strings)
        while True:
            item = await self._queue.get()
            if isinstance(item, TandemError):
                raise item
            if isinstance(item, SequenceProgress):
                yield Progress(item.num_ahead, item.num_prefilled)
                continue
            delta = text.take(item)
            reason = item.finish_reason
            if text.stop is not None:
                reason = FinishReason.STOP_STRING
                self.close()
            if delta.token_ids:
                yield delta
            if reason is not None:
                yield self._finished(reason, text)
                return

    def _opening(self, sequence_id: int) -> OpenSequence:
        timeout = self.request.timeout_seconds
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - self._arrived_at))
        return OpenSequence(
            sequence_id=sequence_id,
            token_ids=tuple(self.committed),
            num_prompt=len(self.request.prompt),
            sampling=self.request.sampling,
            lookahead=self._lookahead,
            priority=self.request.priority,
            resumed=len(self.committed) > len(self.request.prompt),
            timeout_seconds=timeout,
        )

    def _finished(self, reason: FinishReason, text: TextStream) -> Finished:
        num_prompt = len(self.request.prompt)
        tally = self._tally
        first_token_at = self._first_token_at or self._arrived_at
        return Finished(
            reason=reason,
            usage=Usage(
                prompt=num_prompt,
                cached=tally.cached,
                delivered=text.num_delivered,
                discarded=len(self.committed) - num_prompt - text.num_delivered,
            ),
            speculation=tally.figures(),
            timing=GenerationTiming(
                total_seconds=time.monotonic() - self._arrived_at,
                time_to_first_token_seconds=first_token_at - self._arrived_at,
                queue_seconds=tally.queue_seconds,
                prefill_seconds=tally.prefill_seconds,
                steps_seconds=tally.steps_seconds,
            ),
            stop=text.stop or "",
        )
