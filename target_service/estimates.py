"""What is known of a sequence's draft: how often its tokens are kept, and when they come."""

from __future__ import annotations


class Acceptance:
    """How often draft tokens were kept lately: old tests count less with every new one."""

    def __init__(self, memory: float = 0.85) -> None:
        self._memory = memory
        self._num_tested = self._num_kept = 0.0
        self.kept_last = False  # whether the last one tested was kept

    def learn(self, num_tested: int, num_accepted: int) -> None:
        """A run was tested: the first num_accepted were kept, one more at most was not."""
        for kept in [True] * num_accepted + [False] * (num_tested - num_accepted):
            self._num_tested = self._memory * self._num_tested + 1
            self._num_kept = self._memory * self._num_kept + kept
            self.kept_last = kept

    def rate(self, prior: float) -> float:
        """The chance that the next one is kept; the prior counts as half a test."""
        return (self._num_kept + 0.5 * prior) / (self._num_tested + 0.5)


class Arrivals:
    """When a draft's tokens come. All in monotonic seconds of this process."""

    def __init__(self) -> None:
        self.turnaround: float | None = None  # from a decision to the first token of a chain
        self.spacing: float | None = None  # between pieces of one chain
        self.chance = 0.5  # that a decision that leaves no draft token is followed by one
        self.last_at = 0.0  # of any piece
        self._awaited = False

    def decided(self, num_left: int) -> None:
        """A decision leaves so many draft tokens waiting."""
        if self._awaited:  # nothing has come since the last one
            self.chance *= 0.8
        self._awaited = num_left == 0

    def arrived(self, at: float, decided_at: float | None, goes_on: bool) -> None:
        """A piece that continues what is decided (or the chain, which was free to go on)."""
        if self._awaited and decided_at is not None:
            self.turnaround = _blend(self.turnaround, at - decided_at)
        elif goes_on:
            self.spacing = _blend(self.spacing, at - self.last_at)
        if self._awaited:
            self.chance = 0.8 * self.chance + 0.2
        self._awaited = False
        self.last_at = at


def _blend(old: float | None, new: float) -> float:
    return new if old is None else 0.8 * old + 0.2 * new
