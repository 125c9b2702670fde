"""An engine in a service: its thread, the streams that hold its sequences, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from common.bell import Bell
from common.engine_thread import Engine, EngineThread
from common.errors import InvalidRequestError, UnavailableError
from common.leases import Lease, Leases
from common.types import (
    Draining,
    Heartbeat,
    OpenSequence,
    StepResult,
)

RequestT = TypeVar("RequestT")
STUCK_SECONDS = 60.0


class Observer(Protocol):
    """Watches the sequences of a service, for metrics and traces; ids are the engine's.

    Called in the event loop's thread; must be quick and must not fail.
    """

    def opened(self, sequence: OpenSequence) -> None:
        """A sequence was handed to the engine."""

    def stepped(self, result: StepResult) -> StepResult | None:
        """A step has ended, or nothing was to do.

        May return the same with trace contexts put in, and must change nothing else.
        """

    def closed(self, sequence_id: int) -> None:
        """A sequence has ended by itself (`stepped` told so) or was closed from outside."""


class EngineHost:
    """Joins an engine's thread and the streams in the event loop.

    `failed` is set when the engine's thread dies or has been in one step for
    `STUCK_SECONDS`; the service then stops with an error.
    """

    def __init__(self, engine: Engine[Any], observers: Sequence[Observer] = ()) -> None:
        self._engine = engine
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._steps = Bell(self._loop, self._deliver)
        self._thread = EngineThread(engine, self._steps.hand_over, self._on_engine_failure)
        self.leases = Leases(self._to_engine, self._closed)
        self._draining: Draining | None = None
        self._watchdog: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()
        self._watchdog = self._loop.create_task(self._watch())

    def num_live(self) -> int:
        """How many sequences are open."""
        return self.leases.num_live()

    def drain(self, grace_seconds: float) -> None:
        """Take no new sequence; tell every stream."""
        self._draining = Draining(grace_seconds)
        self.leases.announce(self._draining)

    async def stop(self) -> None:
        """End the streams, then the thread."""
        self.leases.end()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not self.failed.done():  # else the thread may be stuck, and ring at any time
            await asyncio.to_thread(self._thread.stop)
            self._steps.close()

    async def run_stream(
        self, requests: AsyncIterator[RequestT], receive: Callable[[Lease, RequestT], None]
    ) -> AsyncIterator[list[Any]]:
        """Batches of replies for one stream, while `receive` is called for every request.

        Ends when the peer has ended its side, when the service ends, or when the peer does
        not read; what the stream carried is closed then.
        """
        lease = self.leases.attach()
        if self._draining is not None:
            lease.outbox.put(self._draining)

        async def read() -> None:
            try:
                async for request in requests:
                    receive(lease, request)
            finally:
                lease.outbox.close()

        reader = self._loop.create_task(read())
        try:
            async for batch in lease.outbox.batches():
                yield batch
        finally:
            self.leases.detach(lease)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def open(self, lease: Lease, sequence: OpenSequence) -> None:
        """Open a sequence; raises `TandemError` if the stream can't."""
        if self._draining is not None:
            raise UnavailableError("the service is about to stop", retry_after_seconds=1.0)
        wire_id = sequence.sequence_id
        arrived_at = time.monotonic()
        fork_of = lease.engine_id(sequence.fork_of)  # before it can name the sequence itself
        engine_id = self.leases.open(lease, wire_id, arrived_at)
        if engine_id is None:
            raise InvalidRequestError(f"{wire_id} is open on this stream", field="sequence_id")
        sequence = replace(sequence, sequence_id=engine_id, fork_of=fork_of, arrived_at=arrived_at)
        for observer in self._observers:
            observer.opened(sequence)
        self._to_engine(sequence)

    @staticmethod
    def echo(lease: Lease, heartbeats: Iterable[Heartbeat]) -> None:
        """Answer heartbeats."""
        for heartbeat in heartbeats:
            lease.outbox.put(replace(heartbeat, echo=True))

    def _to_engine(self, event: Any) -> None:
        self._engine.submit(event)
        self._thread.wake()

    def _deliver(self, result: StepResult) -> None:
        for observer in self._observers:
            result = observer.stepped(result) or result
        self.leases.deliver(result)

    def _closed(self, engine_id: int) -> None:
        for observer in self._observers:
            observer.closed(engine_id)

    def _on_engine_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._steps.take_all()  # nothing already decided is lost
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self._thread.stuck_seconds > STUCK_SECONDS:
                self._fail(RuntimeError(f"no step has ended for {STUCK_SECONDS:.0f} s"))
