"""What the draft exposes, from what its engine says: an observer of the engine's host."""

from __future__ import annotations

from common.metrics import ModelMetrics
from common.types import OpenSequence, StepResult


class DraftMetrics:
    """Counts proposals. See `common.engine_host.Observer`."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._num_sequences = 0

    def opened(self, sequence: OpenSequence) -> None:
        """See `Observer`."""
        self._count_sequences(1)

    def stepped(self, result: StepResult) -> None:
        """See `Observer`."""
        metrics, status = self._metrics, result.status
        metrics.add("draft_proposals_total", len(result.proposals))
        metrics.add("draft_tokens_total", sum(len(p.token_ids) for p in result.proposals))
        metrics.add("draft_refusals_total", len(result.refusals))
        if status.num_blocks:
            usage = 1 - status.num_free_blocks / status.num_blocks
            metrics.set("draft_kv_cache_usage_ratio", usage)

    def closed(self, sequence_id: int) -> None:
        """See `Observer`."""
        self._count_sequences(-1)

    def _count_sequences(self, change: int) -> None:
        self._num_sequences += change
        self._metrics.set("draft_num_sequences", self._num_sequences)
