"""Ways to guess."""

from __future__ import annotations

from typing import Protocol

from common.types import Commit, EngineStatus, OpenSequence, Proposal


class Drafter(Protocol):
    """Guesses tokens for many sequences; one thread uses it.

    Under REJECTION a drafter may stop for anything that it knew before it drew a token, never
    because of the token it then drew; and tokens leave in the step that drew them.
    """

    def open(self, s: OpenSequence) -> None:
        """Begin; raises `TandemError` if this drafter can't serve the sequence."""

    def commit(self, c: Commit) -> None:
        """Take in the target's decision; raises `TandemError` if it makes no sense."""

    def close(self, sid: int) -> None:
        """End."""

    def step(self) -> list[Proposal]:
        """Draw what the sequences' lookahead allows, or as much as one pass gives."""

    def has_work(self) -> bool:
        """Whether a step now would draw anything."""

    def num_unread(self, sid: int) -> int:
        """Committed tokens that it has to take in before it can guess."""

    def status(self) -> EngineStatus:
        """How things stand."""
