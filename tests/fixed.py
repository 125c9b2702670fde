"""A drafter that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable

from common.types import Commit, EngineStatus, OpenSequence, Proposal
from draft_service.sequence import DraftSequence


class FixedDrafter:
    """Guesses what a function says for each position; right, wrong or random."""

    def __init__(self, guess: Callable[[int, int], int]) -> None:
        self._guess = guess  # (sequence id, position) -> token
        self._seqs: dict[int, DraftSequence] = {}

    def open(self, s: OpenSequence) -> None:
        self._seqs[s.sequence_id] = DraftSequence.of(s)

    def commit(self, c: Commit) -> None:
        self._seqs[c.sequence_id].commit(c)

    def close(self, sid: int) -> None:
        del self._seqs[sid]

    def has_work(self) -> bool:
        return True

    def num_unread(self, sid: int) -> int:
        return 0

    def status(self) -> EngineStatus:
        return EngineStatus()

    def step(self) -> list[Proposal]:
        wanting = [s for s in self._seqs.values() if s.num_wanted]
        return [
            s.extend([self._guess(s.sid, len(s.tokens) + i) for i in range(s.num_wanted)])
            for s in wanting
        ]
