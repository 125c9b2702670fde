"""One request on its way through a target and, if there is one, a draft.

Either may change on the way: the session is told by the relay whom to leave and where to open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

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
from gateway.metrics import GatewayMetrics
from gateway.peer import Peer
from gateway.records import DraftWatch, RequestRecord, Tally, TargetWatch, cut_off
from gateway.spans import RequestSpans
from gateway.text import TextStream
from gateway.types import (
    Delta,
    Finished,
    GenerationRequest,
    GenerationTiming,
    Progress,
    Usage,
)

QueueItem = Verdict | SequenceProgress | TandemError


class Session:
    """The state of one request; belongs to the event loop's thread.

    The methods `take_*` and `fail` are called by the relay and never wait for the client,
    which reads `events`.
    """

    QUEUE_MARGIN = 4  # verdicts bring a token each, so only a broken target overflows

    def __init__(
        self,
        request: GenerationRequest,
        arrived_at: float,
        metrics: GatewayMetrics,
        spans: RequestSpans | None = None,
        fork_of: int = 0,
    ) -> None:
        self.request = request
        self.spans = spans  # of a sampled request
        self.trace_id = spans.trace_id if spans else ""  # for logs and exemplars
        self.finished: Finished | None = None  # once the client has been told the end
        self.error: TandemError | None = None  # once the client has been told it
        self.committed = [*request.prompt, *request.output_prefix]
        self.target: Peer[Session] | None = None  # None: it waits for another one
        self.last_target: Peer[Session] | None = None  # stays when it is left
        self.target_id = 0  # its sequence id there
        self.draft: Peer[Session] | None = None
        self.last_draft: Peer[Session] | None = None  # stays when it is detached
        self.avoided: set[tuple[object, int]] = set()  # streams that refused it; the relay's
        self.num_moves = 0  # to other targets, or back to the same
        self.num_losses = 0  # of targets since the last token
        self.ended = False  # nothing more comes from the target
        self._num_given = len(self.committed)  # tokens the client had
        self._draft_id = 0  # also the epoch of the draft's chains
        self._lookahead = request.lookahead
        self._tally = Tally()
        self._watch = DraftWatch()
        self._metrics = metrics
        self._num_delivered = 0  # tokens handed to the client's task
        self._arrived_at = arrived_at  # monotonic
        self._first_token_at: float | None = None
        self._last_token_at = arrived_at
        self._closed_at: float | None = None
        self._clock = TargetWatch(arrived_at)
        self._queue: asyncio.Queue[QueueItem] = asyncio.Queue()

    @property
    def wants_draft(self) -> bool:
        """Whether a draft would be of use now."""
        wanted = self.request.lookahead > 0 and not self.ended
        return wanted and self.draft is None and self.target is not None

    @property
    def begun(self) -> bool:
        """Whether a token has been decided."""
        return len(self.committed) > self._num_given

    def open_at(
        self,
        target: Peer[Session],
        target_id: int,
        reason: str = "first",
        fork_of: int = 0,
    ) -> None:
        """Let a target decide from here on; target_id is new."""
        self.target = self.last_target = target
        self.target_id = target_id
        self._lookahead = self.request.lookahead
        self._clock.opened(time.monotonic())
        opening = self._opening("target", target, target_id, reason)
        target.open(self, replace(opening, fork_of=fork_of))

    def leave_target(self, event: str, message: str = "") -> None:
        """Go on without a target for the moment; event and message say why, for the trace.

        The draft is left as well: the next target does not know its chain.
        """
        if self.target is None:
            return
        if self.spans:
            self.spans.target_gone(event, message)
        self.target.close(self.target_id)
        self.target = None
        self.detach()
        self._clock.left()
        self._tally.moved()
        self.num_moves += 1

    def attach(self, draft: Peer[Session], draft_id: int, reason: str = "first") -> None:
        """Let a draft guess from here on; draft_id is new and larger than any before."""
        self.draft = self.last_draft = draft
        self._draft_id = draft_id
        draft.open(self, self._opening("draft", draft, draft_id, reason))
        self._watch.attached(time.monotonic())

    def detach(self, event: str = "", message: str = "") -> None:
        """Go on undrafted; event and message say why, for the trace."""
        if self.draft is not None:
            if self.spans:
                self.spans.draft_gone(event, message)
            draft, self.draft = self.draft, None
            draft.close(self._draft_id)
            self._watch.detached(time.monotonic())

    def close(self) -> None:
        """Nothing more is wanted from target and draft; may be called again."""
        self.ended = True
        self._closed_at = self._closed_at or time.monotonic()
        if self.spans:
            self.spans.closed()
        if self.target is not None:
            self.target.close(self.target_id)
        self.detach()

    def fail(self, error: TandemError, at_target: str | None = None) -> None:
        """End with an error, after what has been decided already.

        at_target: the event that befell the target, or an empty text if it gave up by itself.
        """
        if self.spans and at_target is not None:
            self.spans.target_failed(str(error), at_target)
        self.close()
        self._queue.put_nowait(error)

    def take_proposal(self, proposal: Proposal) -> None:
        """Pass a draft's guess on, under the target's name for this sequence."""
        if self.ended or self.target is None:
            return
        self._tally.drafted += len(proposal.token_ids)
        chain_id = ChainId(self._draft_id, proposal.chain_id.serial)
        if self.spans:
            self.spans.proposed(proposal)
        self._watch.proposed(chain_id, proposal.base_len, time.monotonic())
        self.target.send(
            Proposal(
                sequence_id=self.target_id,
                chain_id=chain_id,
                base_len=proposal.base_len,
                start=proposal.start,
                token_ids=proposal.token_ids,
                distributions=proposal.distributions,
                traceparent=proposal.traceparent,
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
            told = error_for(error.code, error.message, error.field, error.retry_after_seconds)
            self.fail(told, at_target="")
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
        self._clock.heard(time.monotonic())
        if self.spans:
            self.spans.heard(verdict)
        if verdict.token_ids:
            self.num_losses = 0
            self._note_tokens(len(verdict.token_ids))
        self.committed.extend(verdict.token_ids)
        self._lookahead = min(verdict.lookahead, self.request.lookahead)
        if verdict.finish_reason is not None:
            self.close()
        elif self.draft is not None:
            if verdict.num_tested > verdict.num_accepted:
                self._watch.rejected(len(self.committed), time.monotonic())
            if self.spans:
                self.spans.committed(len(self.committed))
            self.draft.send(
                Commit(
                    sequence_id=self._draft_id,
                    committed_len=verdict.committed_len,
                    token_ids=verdict.token_ids,
                    lookahead=self._lookahead,
                    traceparent=verdict.traceparent,
                )
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
        r = self.request
        text = TextStream(tokenizer, r.prompt, r.stop_strings, r.output_prefix, r.index)
        while True:
            item = await self._queue.get()
            if isinstance(item, TandemError):
                self.error = item
                raise item
            if isinstance(item, SequenceProgress):
                yield Progress(item.num_ahead, item.num_prefilled)
                continue
            delta = text.take(item)
            reason = item.finish_reason
            if text.stop is not None:
                reason = FinishReason.STOP_STRING
                self.close()
            self._num_delivered = text.num_delivered
            if delta.token_ids:
                yield delta
            if reason is not None:
                self.finished = self._finished(reason, text.stop or "")
                yield self.finished
                return

    def _opening(
        self, kind: str, peer: Peer[Session], sequence_id: int, reason: str
    ) -> OpenSequence:
        traceparent = ""
        if self.spans:
            num = len(self.committed)
            traceparent = self.spans.opened(kind, peer.address, sequence_id, num, reason)
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
            resumed=self.num_moves > 0 or self.begun,
            timeout_seconds=timeout,
            cache_scope=self.request.cache_scope,
            traceparent=traceparent,
        )

    def _note_tokens(self, num: int) -> None:
        """A verdict has brought tokens."""
        now, trace_id, model = time.monotonic(), self.trace_id, self.request.model.name
        if self._first_token_at is None:
            self._first_token_at = now
            self._metrics.first_token(model, now - self._arrived_at, trace_id)
        else:
            self._metrics.tokens(model, num, now - self._last_token_at, trace_id)
        self._last_token_at = now

    def _finished(self, reason: FinishReason, stop: str) -> Finished:
        return Finished(
            reason=reason,
            usage=self._usage(),
            speculation=self._tally.figures(),
            timing=self._timing(),
            stop=stop,
            index=self.request.index,
        )

    def _usage(self) -> Usage:
        num_prompt = len(self.request.prompt)
        return Usage(
            prompt=num_prompt,
            cached=min(self._tally.cached, num_prompt),
            delivered=self._num_delivered,
            discarded=len(self.committed) - self._num_given - self._num_delivered,
        )

    def _timing(self) -> GenerationTiming:
        return self._clock.timing(self._tally, time.monotonic(), self._first_token_at)

    def record(self) -> RequestRecord:
        """The request's figures, as the client has been told them if it has."""
        told, request, tally = self.finished, self.request, self._tally
        timing = told.timing if told else self._timing()
        closed_at = self._closed_at or time.monotonic()
        wanted_seconds = 0.0  # without a target there is nothing to draft for
        if request.lookahead:
            wanted_seconds = closed_at - self._arrived_at - self._clock.away_seconds
        return RequestRecord(
            request_id=request.request_id,
            model=request.model.name,
            ending=told.reason.name.lower() if told else self._cut_off(),
            rule=request.sampling.rule,
            usage=told.usage if told else self._usage(),
            speculation=told.speculation if told else tally.figures(),
            timing=timing,
            error=str(self.error or ""),
            trace_id=self.trace_id,
            stale=tally.stale_counts,
            mean_batch_size=tally.batch_sizes / max(1, tally.steps),
            num_preemptions=tally.preemptions,
            num_moves=self.num_moves,
            away_seconds=self._clock.away_seconds,
            lookahead=request.lookahead,
            num_chains=self._watch.num_chains,
            num_paused_steps=tally.paused_steps,
            waited_seconds=tally.waited_seconds,
            undrafted_seconds=max(0.0, wanted_seconds - self._watch.attached_seconds(closed_at)),
            draft_turnaround_seconds=self._watch.turnaround_seconds,
        )

    def _cut_off(self) -> str:
        """How a request ended that has no finish reason."""
        waited = time.monotonic() - self._arrived_at
        return cut_off(self.error, waited, self.request.timeout_seconds)
