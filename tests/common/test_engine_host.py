"""An engine in a service: its thread, the streams that hold its sequences, its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from common import engine_host
from common.engine_host import EngineHost
from common.errors import InvalidRequestError, UnavailableError
from common.leases import Lease
from common.types import (
    CloseSequence,
    Commit,
    Draining,
    EngineStatus,
    FinishReason,
    Heartbeat,
    OpenSequence,
    SamplingParams,
    StepResult,
    Verdict,
)

POISON = (666,)


class EchoEngine:
    """Answers an open with its tokens and a commit with an end; dies of poison."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.live: set[int] = set()
        self.gate = threading.Event()  # a step waits for it
        self.gate.set()
        self._inbox: deque[Any] = deque()

    def submit(self, event: Any) -> None:
        self._inbox.append(event)

    def has_work(self) -> bool:
        return bool(self._inbox)

    def hold_seconds(self) -> float:
        return 0.0

    def num_live(self) -> int:
        return len(self.live)

    def step(self, before_pass: Callable[[], None]) -> StepResult:
        assert self.gate.wait(10)
        verdicts = []
        while self._inbox:
            event = self._inbox.popleft()
            self.heard.append(event)
            sid = event.sequence_id
            match event:
                case OpenSequence():
                    if event.token_ids == POISON:
                        raise FloatingPointError("poison")
                    self.live.add(sid)
                    verdicts.append(Verdict(sid, 1, 0, 0, event.token_ids))
                case Commit():
                    self.live.remove(sid)
                    reason = FinishReason.LENGTH
                    verdicts.append(Verdict(sid, 2, 0, 0, (9,), finish_reason=reason))
                case CloseSequence():
                    self.live.discard(sid)
        return StepResult(verdicts=tuple(verdicts), status=EngineStatus(num_running=len(self.live)))


def _open(wire_id: int, *token_ids: int) -> OpenSequence:
    return OpenSequence(wire_id, token_ids, len(token_ids), SamplingParams())


class Stream:
    """One peer: sends events, collects replies."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: list[Any] = []
        self.refused: list[Exception] = []
        self.status_at: list[float] = []
        self.task = asyncio.ensure_future(self._run())

    def send(self, request: Any) -> None:
        self._requests.put_nowait(request)

    def hang_up(self) -> None:
        self._requests.put_nowait(None)

    async def _sent(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _run(self) -> None:
        async for batch in self._host.run_stream(self._sent(), self._receive):
            for reply in batch:
                if isinstance(reply, EngineStatus):
                    self.status_at.append(time.monotonic())
                else:
                    self.heard.append(reply)

    def _receive(self, lease: Lease, request: Any) -> None:
        match request:
            case OpenSequence():
                try:
                    self._host.open(lease, request)
                except (InvalidRequestError, UnavailableError) as error:
                    self.refused.append(error)
            case Heartbeat():
                self._host.echo(lease, [request])
            case Exception():
                raise request
            case _:
                lease.submit(request)


def _run(test: Callable[[EngineHost, EchoEngine], Awaitable[None]]) -> None:
    async def with_host() -> None:
        engine = EchoEngine()
        host = EngineHost(engine)
        host.start()
        async with asyncio.timeout(10):
            try:
                await test(host, engine)
            finally:
                engine.gate.set()
                await host.stop()

    asyncio.run(with_host())


async def _until(holds: Callable[[], Any]) -> None:
    while not holds():  # noqa: ASYNC110  # what is awaited has no event
        await asyncio.sleep(0.002)


def _opened(engine: EchoEngine) -> list[int]:
    return [e.sequence_id for e in engine.heard if isinstance(e, OpenSequence)]


def test_each_stream_has_its_own_ids() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        a, b = Stream(host), Stream(host)
        a.send(_open(1, 5))
        b.send(_open(1, 6))
        await _until(lambda: a.heard and b.heard)
        said = [(v.sequence_id, v.token_ids) for v in (*a.heard, *b.heard)]
        assert said == [(1, (5,)), (1, (6,))]
        assert len(set(_opened(engine))) == 2
        b.send(Commit(1, 1, (6,), 0))
        await _until(lambda: len(b.heard) == 2)
        assert b.heard[1].ended
        assert len(a.heard) == 1
        assert host.num_live() == 1

    _run(test)


async def _heard(engine: EchoEngine, num: int) -> None:
    await _until(lambda: len(engine.heard) >= num)


def test_forks_are_told_by_the_engine_s_ids() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        a, b = Stream(host), Stream(host)
        a.send(_open(7, 5))
        await _until(lambda: a.heard)
        for stream, wire_id, fork_of in ((a, 8, 7), (b, 8, 7), (a, 9, 9)):
            stream.send(replace(_open(wire_id, 5), fork_of=fork_of))
            await _heard(engine, len(engine.heard) + 1)
        told = [e.fork_of for e in engine.heard]
        assert told == [0, _opened(engine)[0], 0, 0]  # another stream's, its own: none

    _run(test)


def test_an_open_id_can_t_be_opened_again_a_closed_one_can() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        stream.send(_open(1, 5))
        stream.send(_open(1, 6))
        await _until(lambda: stream.refused and stream.heard)
        assert isinstance(stream.refused[0], InvalidRequestError)
        assert stream.refused[0].field == "sequence_id"
        assert len(engine.live) == 1
        stream.send(CloseSequence(1))
        stream.send(_open(1, 7))
        await _until(lambda: len(stream.heard) == 2)
        assert len(engine.live) == 1

    _run(test)


@pytest.mark.parametrize("ending", ["hangs up", "is cancelled", "sends what raises"])
def test_the_end_of_a_stream_closes_what_it_carried(ending: str) -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream, other = Stream(host), Stream(host)
        stream.send(_open(1, 5))
        stream.send(_open(2, 5))
        other.send(_open(1, 5))
        await _until(lambda: len(engine.live) == 3)
        if ending == "hangs up":
            stream.hang_up()
            await stream.task
        elif ending == "is cancelled":
            stream.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stream.task
        else:
            stream.send(KeyError("odd"))
            with pytest.raises(KeyError, match="odd"):
                await stream.task
        await _until(lambda: len(engine.live) == 1)
        assert host.num_live() == 1
        assert not other.task.done()

    _run(test)


def test_close_wins_over_a_verdict_on_its_way() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        engine.gate.clear()
        stream.send(_open(1, 5))
        await _until(lambda: host.num_live() == 1)
        stream.send(CloseSequence(1))
        await _until(lambda: host.num_live() == 0)
        engine.gate.set()
        await _until(lambda: any(isinstance(e, CloseSequence) for e in engine.heard))
        stream.send(_open(2, 6))
        await _until(lambda: stream.heard)
        assert [v.sequence_id for v in stream.heard] == [2]

    _run(test)


def test_draining_refuses_opens_and_lets_the_others_finish() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        stream.send(_open(1, 5))
        await _until(lambda: stream.heard)
        host.drain(7.0)
        late = Stream(host)
        stream.send(_open(2, 5))
        late.send(_open(1, 5))
        await _until(lambda: stream.refused and late.refused)
        for refusal in (stream.refused[0], late.refused[0]):
            assert isinstance(refusal, UnavailableError)
            assert refusal.retry_after_seconds == 1.0
        assert Draining(7.0) in stream.heard
        assert late.heard == [Draining(7.0)]
        stream.send(Commit(1, 1, (5,), 0))
        await _until(lambda: host.num_live() == 0)
        assert len(_opened(engine)) == 1

    _run(test)


def test_stop_ends_the_streams_after_what_is_queued() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        stream.send(Heartbeat(3))
        stream.send(_open(1, 5))
        await _until(lambda: engine.live)
        await host.stop()
        await stream.task
        assert Heartbeat(3, echo=True) in stream.heard
        assert not host.failed.done()

    _run(test)


def test_an_engine_that_dies_fails_the_host() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        stream.send(_open(1, *POISON))
        with pytest.raises(FloatingPointError, match="poison"):
            await host.failed
        await host.stop()
        await stream.task

    _run(test)


def test_an_engine_that_hangs_fails_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "STUCK_SECONDS", 0.2)

    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        engine.gate.clear()
        stream.send(_open(1, 5))
        with pytest.raises(RuntimeError, match="no step has ended"):
            await host.failed
        engine.gate.set()  # a service would exit now, with the thread still in its step
        await asyncio.to_thread(host._thread.stop)

    _run(test)


def test_an_idle_engine_with_open_sequences_is_heard_of() -> None:
    """Bounded silence means lost, so a second without a word is too long."""

    async def test(host: EngineHost, engine: EchoEngine) -> None:
        stream = Stream(host)
        stream.send(_open(1, 5))
        await _until(lambda: len(stream.status_at) == 3)
        gaps = [b - a for a, b in zip(stream.status_at, stream.status_at[1:], strict=False)]
        assert max(gaps) < 1.0
        num, told = len(engine.heard), len(stream.status_at)
        stream.send(CloseSequence(1))
        await _until(lambda: len(stream.status_at) == told + 1)  # falls idle: told at once
        assert len(engine.heard) == num + 1
        await asyncio.sleep(0.6)
        assert len(stream.status_at) == told + 1  # nothing is open, nothing to say

    _run(test)


def test_a_peer_that_does_not_read_loses_its_stream() -> None:
    async def test(host: EngineHost, engine: EchoEngine) -> None:
        leases: list[Lease] = []

        async def requests() -> AsyncIterator[Lease | None]:
            yield None
            await asyncio.Event().wait()

        def receive(lease: Lease, _: None) -> None:
            leases.append(lease)
            host.open(lease, _open(1, 5))

        batches: Any = host.run_stream(requests(), receive)  # type: ignore[arg-type]
        await anext(batches)
        for i in range(100_001):
            leases[0].outbox.put(Heartbeat(i))
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        await _until(lambda: not engine.live)

    _run(test)
