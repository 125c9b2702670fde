"""What the target exposes, from what its engine says: an observer of the engine's host."""

from __future__ import annotations

import operator
import time

from common.metric_table import POSITIONS
from common.metrics import ModelMetrics, sampled_trace_id
from common.types import (
    NONE_STALE,
    EngineStatus,
    OpenSequence,
    StaleCounts,
    StepResult,
    Verdict,
)


class TargetMetrics:
    """Counts steps, verdicts and blocks. See `common.engine_host.Observer`."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._traced: dict[int, str] = {}  # trace ids of sampled sequences, by the engine's id
        self._num_preemptions = 0  # as the engine said last
        self._loop_time: float | None = None  # of the loop's thread; None after an idle step

    def opened(self, sequence: OpenSequence) -> None:
        """See `Observer`."""
        if trace_id := sampled_trace_id(sequence.traceparent):
            self._traced[sequence.sequence_id] = trace_id

    def stepped(self, result: StepResult) -> None:
        """See `Observer`."""
        self._take_status(result.status)
        now, before = time.thread_time(), self._loop_time
        self._loop_time = now if result.info else None
        if result.info:
            metrics, info = self._metrics, result.info
            metrics.observe("step_seconds", info.seconds, self._example(result))
            metrics.observe("step_num_sequences", info.num_sequences)
            metrics.observe("step_num_rows", info.num_rows)
            metrics.add("prefix_cache_queries_total", info.num_sought)
            metrics.add("prefix_cache_hits_total", info.num_found)
            if before is not None:
                metrics.observe("event_loop_seconds", now - before)
        if result.verdicts:
            self._take_verdicts(result.verdicts)

    def closed(self, sequence_id: int) -> None:
        """See `Observer`."""
        self._traced.pop(sequence_id, None)

    def _take_status(self, status: EngineStatus) -> None:
        metrics = self._metrics
        metrics.set("num_requests_running", status.num_running)
        metrics.set("num_requests_waiting", status.num_waiting)
        if status.num_blocks:
            metrics.set("kv_cache_usage_ratio", 1 - status.num_free_blocks / status.num_blocks)
        metrics.add("num_preemptions_total", status.num_preemptions - self._num_preemptions)
        self._num_preemptions = status.num_preemptions

    def _take_verdicts(self, verdicts: tuple[Verdict, ...]) -> None:
        """Sum first: a counter costs ten times what an addition does."""
        add, per_position, stale = self._metrics.add, [0] * len(POSITIONS), NONE_STALE
        for v in verdicts:
            for i in range(v.num_accepted):
                per_position[min(i, len(POSITIONS) - 1)] += 1
            if v.num_stale:
                stale = StaleCounts(*map(operator.add, stale, v.stale))
        add("committed_tokens_total", sum(len(v.token_ids) for v in verdicts))
        add("spec_decode_num_paused_total", sum(v.lookahead == 0 for v in verdicts if v.token_ids))
        add("draft_wait_seconds_total", sum(v.timing.waited_seconds for v in verdicts))
        add("spec_decode_num_drafts_total", sum(v.num_tested > 0 for v in verdicts))
        add("spec_decode_num_draft_tokens_total", sum(v.num_tested for v in verdicts))
        add("spec_decode_num_accepted_tokens_total", sum(v.num_accepted for v in verdicts))
        for position, num in zip(POSITIONS, per_position, strict=True):
            add("spec_decode_num_accepted_tokens_per_pos_total", num, position)
        for reason, num in stale._asdict().items():
            add("stale_proposals_total", num, reason)

    def _example(self, result: StepResult) -> str:
        """The trace of a sampled sequence that the step decided for, if there is one."""
        if not self._traced:
            return ""
        found = (self._traced.get(v.sequence_id) for v in result.verdicts)
        return next(filter(None, found), "")
