"""One request on its way through a target and, if there is one, a draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

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
from gateway.records import DraftWatch, RequestRecord, Tally
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
DEADLINE_MARGIN_SECONDS = 0.01  # a server may notice a deadline that much before we do


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
        self.target_id = target_id
        self._target = target
        self._fork_of = fork_of  # a target id with the same prompt; 0: none
        self._draft: Peer[Session] | None = None
        self._draft_id = 0  # also the epoch of the draft's chains
        self._lookahead = request.lookahead
        self._ended = False  # nothing more comes from the target
        self._tally = Tally()
        self._watch = DraftWatch()
        self._metrics = metrics
        self._num_delivered = 0  # tokens handed to the client's task
        self._arrived_at = arrived_at  # monotonic
        self._first_token_at: float | None = None
        self._last_token_at = arrived_at
        self._closed_at: float | None = None
        self._opened_at = time.monotonic()  # when it was sent to the target
        self._heard_at: float | None = None  # when the last verdict came
        self._queue: asyncio.Queue[QueueItem] = asyncio.Queue()
        target.open(self, self._opening("target", target, target_id))
        metrics.opened(request.model.name, len(request.prompt))

    @property
    def wants_draft(self) -> bool:
        """Whether a draft would be of use now."""
        return self.request.lookahead > 0 and not self._ended and self._draft is None

    def attach(self, draft: Peer[Session], draft_id: int) -> None:
        """Let a draft guess from here on; draft_id is new and larger than any before."""
        self._draft, self._draft_id = draft, draft_id
        draft.open(self, self._opening("draft", draft, draft_id))
        self._watch.attached(time.monotonic())

    def detach(self, event: str = "", message: str = "") -> None:
        """Go on undrafted; event and message say why, for the trace."""
        if self._draft is not None:
            if self.spans:
                self.spans.draft_gone(event, message)
            self._draft.close(self._draft_id)
            self._draft = None
            self._watch.detached(time.monotonic())

    def close(self) -> None:
        """Nothing more is wanted from target and draft; may be called again."""
        self._ended = True
        self._closed_at = self._closed_at or time.monotonic()
        if self.spans:
            self.spans.closed()
        self._target.close(self.target_id)
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
        if self._ended:
            return
        self._tally.drafted += len(proposal.token_ids)
        chain_id = ChainId(self._draft_id, proposal.chain_id.serial)
        if self.spans:
            self.spans.proposed(proposal)
        self._watch.proposed(chain_id, proposal.base_len, time.monotonic())
        self._target.send(
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
        self._heard_at = time.monotonic()
        if self.spans:
            self.spans.heard(verdict)
        if verdict.token_ids:
            self._note_tokens(len(verdict.token_ids))
        self.committed.extend(verdict.token_ids)
        self._lookahead = min(verdict.lookahead, self.request.lookahead)
        if verdict.finish_reason is not None:
            self.close()
        elif self._draft is not None:
            if verdict.num_tested > verdict.num_accepted:
                self._watch.rejected(len(self.committed), time.monotonic())
            if self.spans:
                self.spans.committed(len(self.committed))
            self._draft.send(
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

    def _opening(self, kind: str, peer: Peer[Session], sequence_id: int) -> OpenSequence:
        traceparent = ""
        if self.spans:
            num = len(self.committed)
            traceparent = self.spans.opened(kind, peer.address, sequence_id, num)
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
            traceparent=traceparent,
            cache_scope=self.request.cache_scope,
            fork_of=self._fork_of if kind == "target" else 0,
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
        num_prompt, num_prefix = len(self.request.prompt), len(self.request.output_prefix)
        return Usage(
            prompt=num_prompt,
            cached=self._tally.cached,
            delivered=self._num_delivered,
            discarded=len(self.committed) - num_prompt - num_prefix - self._num_delivered,
        )

    def _timing(self) -> GenerationTiming:
        tally = self._tally
        now = time.monotonic()
        first_token_at = self._first_token_at or self._arrived_at
        heard_at = self._heard_at
        return GenerationTiming(
            total_seconds=now - self._arrived_at,
            time_to_first_token_seconds=first_token_at - self._arrived_at,
            queue_seconds=tally.queue_seconds,
            prefill_seconds=tally.prefill_seconds,
            steps_seconds=tally.steps_seconds + tally.told_seconds,
            wire_seconds=heard_at - self._opened_at - tally.held_seconds if heard_at else 0.0,
            gateway_seconds=self._opened_at - self._arrived_at + now - (heard_at or now),
        )

    def record(self) -> RequestRecord:
        """The request's figures, as the client has been told them if it has."""
        told, request, tally = self.finished, self.request, self._tally
        timing = told.timing if told else self._timing()
        closed_at = self._closed_at or time.monotonic()
        wanted_seconds = closed_at - self._arrived_at if request.lookahead else 0.0
        return RequestRecord(
            request_id=request.request_id,
            model=request.model.name,
            ending=self._ending(),
            rule=request.sampling.rule,
            usage=told.usage if told else self._usage(),
            speculation=told.speculation if told else tally.figures(),
            timing=timing,
            error=str(self.error or ""),
            trace_id=self.trace_id,
            stale=tally.stale_counts,
            mean_batch_size=tally.batch_sizes / max(1, tally.steps),
            num_preemptions=tally.preemptions,
            lookahead=request.lookahead,
            num_chains=self._watch.num_chains,
            undrafted_seconds=max(0.0, wanted_seconds - self._watch.attached_seconds(closed_at)),
            draft_turnaround_seconds=self._watch.turnaround_seconds,
        )

    def _ending(self) -> str:
        """One of `metric_table.ENDINGS`."""
        if self.finished is not None:
            return self.finished.reason.name.lower()
        code = self.error.code.name if self.error else "CANCELLED"
        timeout = self.request.timeout_seconds
        if code == "CANCELLED" and timeout is not None:
            late = time.monotonic() - self._arrived_at >= timeout - DEADLINE_MARGIN_SECONDS
            code = "DEADLINE_EXCEEDED" if late else code
        return {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "deadline"}.get(code, "error")
