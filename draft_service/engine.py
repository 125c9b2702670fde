"""The draft's engine: takes events in, lets the drafter draw, tells what was drawn."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.errors import TandemError, sequence_error
from common.types import (
    Cause,
    CloseSequence,
    Commit,
    DraftEvent,
    OpenSequence,
    Prefill,
    Proposal,
    Refusal,
    StepInfo,
    StepResult,
)
from draft_service.drafters import Drafter

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    cause: Cause  # its latest commit, or its open
    opened_at: float | None  # monotonic; None once its prompt is read
    num_tokens: int  # of its prompt


class DraftEngine:
    """Runs one drafter; `submit` alone may be called from other threads."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._inbox: deque[DraftEvent] = deque()
        self._open: dict[int, _Entry] = {}
        self._num_ignored = 0
        self._step_id = 0

    def submit(self, event: DraftEvent) -> None:
        """Put an event into the inbox; any thread."""
        self._inbox.append(event)

    def has_work(self) -> bool:
        """Whether a step now would do anything."""
        return bool(self._inbox) or self._drafter.has_work()

    def hold_seconds(self) -> float:
        """See `Engine`: a draft never waits."""
        return 0.0

    def num_live(self) -> int:
        """How many sequences are open."""
        return len(self._open)

    def step(self, before_pass: Callable[[], None] = lambda: None) -> StepResult:
        """Drain the inbox, then draw once. See `Engine`; proposals are told at once."""
        before_pass()
        began = time.monotonic()
        refusals = self._drain()
        prefills = self._prefills()  # those that read a prompt as it comes
        draws = self._drafter.has_work()
        proposals = self._drafter.step()
        info = self._info(began, proposals) if draws else None
        return StepResult(
            info=info,
            proposals=tuple(proposals),
            refusals=tuple(refusals),
            causes={p.sequence_id: self._open[p.sequence_id].cause for p in proposals},
            prefills=(*prefills, *self._prefills()),
            status=replace(self._drafter.status(), num_ignored=self._num_ignored),
        )

    def _drain(self) -> list[Refusal]:
        refusals = []
        while self._inbox:
            event = self._inbox.popleft()
            try:
                self._take(event)
            except TandemError as error:
                refusals.append(Refusal(event.sequence_id, sequence_error(error)))
                if event.sequence_id in self._open:
                    self._close(event.sequence_id)
        return refusals

    def _take(self, event: DraftEvent) -> None:
        if isinstance(event, OpenSequence):
            began = time.monotonic()
            self._drafter.open(event)
            cause = Cause(event.arrived_at)
            self._open[event.sequence_id] = _Entry(cause, began, len(event.token_ids))
        elif event.sequence_id not in self._open:
            self._num_ignored += 1
        elif isinstance(event, Commit):
            self._drafter.commit(event)
            traceparents = (event.traceparent,) if event.traceparent else ()
            self._open[event.sequence_id].cause = Cause(event.arrived_at, traceparents)
        elif isinstance(event, CloseSequence):
            self._close(event.sequence_id)

    def _close(self, sid: int) -> None:
        del self._open[sid]
        self._drafter.close(sid)

    def _info(self, began: float, proposals: list[Proposal]) -> StepInfo:
        self._step_id += 1
        num_drawn = sum(len(p.token_ids) for p in proposals)
        seconds = time.monotonic() - began
        return StepInfo(self._step_id, began, seconds, len(proposals), num_drawn)

    def _prefills(self) -> list[Prefill]:
        """Sequences whose prompt has been read since the last call."""
        now = time.monotonic()
        found = []
        for sid, entry in self._open.items():
            if entry.opened_at is not None and not self._drafter.num_unread(sid):
                found.append(Prefill(sid, entry.opened_at, now, entry.num_tokens))
                entry.opened_at = None
        return found
