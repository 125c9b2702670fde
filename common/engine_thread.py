"""The one thread that owns an engine: torch, sequences and blocks.

Other threads reach it through `submit` (the inbox); what a step has to say goes through
one callback, which the servicer hands to its event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from common.types import StepResult

log = logging.getLogger(__name__)
EventT = TypeVar("EventT", contravariant=True)


class Engine(Protocol[EventT]):
    """What `EngineThread` drives; tests drive it directly."""

    def submit(self, event: EventT) -> None:
        """Put an event into the inbox; any thread."""

    def step(self, before_pass: Callable[[], None]) -> StepResult:
        """Take the inbox, do one step's work, tell what came of it.

        Calls before_pass right before it computes without the GIL, where that is for long.
        """

    def has_work(self) -> bool:
        """Whether a step now would do anything."""

    def hold_seconds(self) -> float:
        """How much longer the next step should wait for events; 0 or less: not at all."""

    def num_live(self) -> int:
        """How many sequences are open."""


class EngineThread:
    """Runs an engine until it is stopped or fails.

    `publish` is called on the engine's thread for every step, and every `SAY_SOMETHING_SECONDS`
    while sequences are open but there is nothing to do: when the next pass is about to begin, so
    that who reads it and the engine don't wait for each other's GIL, or before the thread waits.
    `failed` is called once, with the error, when a step raises.
    """

    SAY_SOMETHING_SECONDS = 0.25  # twice as often as `Leases` passes it on

    def __init__(
        self,
        engine: Engine[EventT],
        publish: Callable[[StepResult], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._failed = failed
        self._wake = threading.Event()
        self._stopping = False
        self._untold: StepResult | None = None  # the last step's
        self._step_began: float | None = None  # monotonic; None between steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that the inbox is not empty; any thread."""
        self._wake.set()

    def stop(self) -> None:
        """End after the current step and wait for it."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def stuck_seconds(self) -> float:
        """How long the current step has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if not self._engine.has_work():
                    self._tell()
                    idle = self.SAY_SOMETHING_SECONDS if self._engine.num_live() else None
                    self._wake.wait(idle)
                self._hold()
                if self._stopping:
                    break
                self._step_began = time.monotonic()
                result = self._engine.step(self._tell)
                self._step_began = None
                self._tell()
                self._untold = result
            self._tell()
        except BaseException as error:
            log.exception("the engine has failed")
            self._tell()
            self._failed(error)

    def _tell(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            self._publish(untold)

    def _hold(self) -> None:
        """Wait as long as the engine finds that worth while; every event lets it think anew."""
        while not self._stopping:
            self._wake.clear()
            seconds = self._engine.hold_seconds()
            if seconds <= 0:
                return
            self._tell()
            self._wake.wait(seconds)
