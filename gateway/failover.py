"""Sequences that change their target: it was lost, it is full, or it is about to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from grpc import StatusCode

from common.errors import SequenceError, UnavailableError
from common.types import ModelInfo
from gateway.fleet import RETRY_SECONDS, Fleet
from gateway.peer import Peer
from gateway.session import Session

MAX_LOSSES = 3
"""A sequence that loses so many targets without a token in between may be what kills them."""
UNAVAILABLE, EXHAUSTED = (
    code.value[0] for code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
)


class Failover:
    """Moves sequences to targets that answer the same; those for which there is none wait.

    `reopen` opens a session at a target, for a reason of `metric_table.REOPENS`. Belongs to
    the event loop's thread.
    """

    def __init__(
        self,
        fleet: Fleet,
        seconds: float,
        reopen: Callable[[Session, Peer[Session], str], None],
    ) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._reopen = reopen
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Session, asyncio.TimerHandle] = {}
        # Targets that drain; the timer runs out when what is there is to move.
        self._draining: dict[Peer[Session], asyncio.TimerHandle | None] = {}

    def awaited(self) -> Iterator[ModelInfo]:
        """The models that sequences wait for."""
        return (session.request.model for session in self._waiting)

    def lose(self, session: Session, target: Peer[Session], reason: str) -> None:
        """A target is gone, or gives a sequence up: open it elsewhere, or wait."""
        if session.ended:
            return
        error = f"the target at {target.address} was lost: {reason}"
        session.leave_target("tandem.target_lost", error)
        session.num_losses += 1
        if session.num_losses > MAX_LOSSES:
            told = f"{error}; it was the {session.num_losses}th without a token in between"
            session.fail(UnavailableError(told, retry_after_seconds=RETRY_SECONDS))
        elif (other := self._fleet.target_for(session)) is not None:
            self._reopen(session, other, "target_lost")
        else:
            timer = self._loop.call_later(self._seconds, self._give_up, session, error)
            self._waiting[session] = timer

    def refused(self, session: Session, target: Peer[Session], error: SequenceError) -> bool:
        """Whether a sequence that a target will not serve goes on elsewhere, or may yet."""
        if error.code not in (UNAVAILABLE, EXHAUSTED):
            return False
        session.avoided.add(target.stream)
        if error.code == EXHAUSTED:
            other = self._fleet.target_for(session)
            if other is not None:
                session.leave_target("tandem.moved")
                self._reopen(session, other, "target_full")
                return True
            if not session.begun:
                return False
        self.lose(session, target, error.message)
        return True

    def drain(self, target: Peer[Session], grace_seconds: float) -> None:
        """A target stops: what is not finished by half of its grace goes elsewhere, if it can.

        What can't stays, and is opened anew when the target is gone.
        """
        if target not in self._draining:
            timer = self._loop.call_later(grace_seconds / 2, self._empty, target)
            self._draining[target] = timer

    def target_gone(self, target: Peer[Session]) -> None:
        """A target's stream has ended."""
        timer = self._draining.pop(target, None)
        if timer is not None:
            timer.cancel()

    def target_ready(self) -> None:
        """A target has come: those that wait and fit go there."""
        for session, timer in list(self._waiting.items()):
            other = None if session.ended else self._fleet.target_for(session)
            if other is not None:
                timer.cancel()
                del self._waiting[session]
                self._reopen(session, other, "target_lost")
        for target, drain_timer in list(self._draining.items()):
            if drain_timer is None:
                self._empty(target)

    def forget(self, session: Session) -> None:
        """A request is over."""
        timer = self._waiting.pop(session, None)
        if timer is not None:
            timer.cancel()

    def _empty(self, target: Peer[Session]) -> None:
        self._draining[target] = None
        for session in list(target.holders.values()):
            other = self._fleet.target_for(session)
            if other is not None:
                session.leave_target("tandem.moved")
                self._reopen(session, other, "target_draining")

    def _give_up(self, session: Session, error: str) -> None:
        del self._waiting[session]
        told = (
            f"{error}; none that answers the same has come within {self._seconds:g} s"
            f" ({self._fleet.why_none(session.request)})"
        )
        session.fail(UnavailableError(told, retry_after_seconds=RETRY_SECONDS))
