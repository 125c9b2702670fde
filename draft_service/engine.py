"""The draft's engine: takes events in, lets the drafter draw, tells what was drawn."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

from common.errors import TandemError, sequence_error
from common.types import CloseSequence, Commit, DraftEvent, OpenSequence, Refusal, StepResult
from draft_service.drafters import Drafter

log = logging.getLogger(__name__)


class DraftEngine:
    """Runs one drafter; `submit` alone may be called from other threads."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._inbox: deque[DraftEvent] = deque()
        self._open: set[int] = set()
        self._num_ignored = 0

    def submit(self, event: DraftEvent) -> None:
        """Put an event into the inbox; any thread."""
        self._inbox.append(event)

    def has_work(self) -> bool:
        """Whether a step now would do anything."""
        return bool(self._inbox) or self._drafter.has_work()

    def num_live(self) -> int:
        """How many sequences are open."""
        return len(self._open)

    def step(self) -> StepResult:
        """Drain the inbox, then draw once."""
        refusals = []
        while self._inbox:
            event = self._inbox.popleft()
            try:
                self._take(event)
            except TandemError as error:
                refusals.append(Refusal(event.sequence_id, sequence_error(error)))
                if event.sequence_id in self._open:
                    self._close(event.sequence_id)
        return StepResult(
            proposals=tuple(self._drafter.step()),
            refusals=tuple(refusals),
            status=replace(self._drafter.status(), num_ignored=self._num_ignored),
        )

    def _take(self, event: DraftEvent) -> None:
        if isinstance(event, OpenSequence):
            self._drafter.open(event)
            self._open.add(event.sequence_id)
        elif event.sequence_id not in self._open:
            self._num_ignored += 1
        elif isinstance(event, Commit):
            self._drafter.commit(event)
        elif isinstance(event, CloseSequence):
            self._close(event.sequence_id)

    def _close(self, sid: int) -> None:
        self._open.remove(sid)
        self._drafter.close(sid)
