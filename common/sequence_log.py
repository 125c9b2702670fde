"""A line for every sequence that a service opens, gives up or refuses."""

from __future__ import annotations

import logging

from common.errors import SequenceError
from common.logs import fields
from common.metrics import sampled_trace_id
from common.types import OpenSequence, StepResult

log = logging.getLogger(__name__)


class SequenceLog:
    """Logs with the sequence's id and trace. See `common.engine_host.Observer`."""

    def __init__(self) -> None:
        self._trace_ids: dict[int, str] = {}  # of sampled sequences

    def opened(self, sequence: OpenSequence) -> None:
        """See `Observer`."""
        if trace_id := sampled_trace_id(sequence.traceparent):
            self._trace_ids[sequence.sequence_id] = trace_id
        if log.isEnabledFor(logging.DEBUG):
            known = self._known(sequence.sequence_id)
            known |= {"tokens": len(sequence.token_ids), "resumed": sequence.resumed}
            log.debug("sequence opened", extra=fields(**known))

    def stepped(self, result: StepResult) -> None:
        """See `Observer`."""
        for verdict in result.verdicts:
            if verdict.error is not None:
                self._failed("sequence given up", verdict.sequence_id, verdict.error)
        for refusal in result.refusals:
            self._failed("sequence refused", refusal.sequence_id, refusal.error)

    def closed(self, sequence_id: int) -> None:
        """See `Observer`."""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("sequence closed", extra=fields(**self._known(sequence_id)))
        self._trace_ids.pop(sequence_id, None)

    def _failed(self, what: str, sequence_id: int, error: SequenceError) -> None:
        """A fault of ours is an error; a request that can't be served is no more than news."""
        level = logging.ERROR if error.reason == "INTERNAL_FAULT" else logging.INFO
        known = self._known(sequence_id) | {"reason": error.reason, "error": error.message}
        log.log(level, what, extra=fields(**known))

    def _known(self, sequence_id: int) -> dict[str, object]:
        return {"sequence_id": sequence_id, "trace_id": self._trace_ids.get(sequence_id)}
