"""One peer of the gateway: connects, keeps the stream, notices when the peer is gone.

A peer is generic: what is said on the stream, and what it means, is in `relay.py`.
Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from common.errors import ConfigurationError, UnavailableError, connection_failure
from common.outbox import Outbox
from common.service import CHANNEL_OPTIONS
from common.types import CloseSequence, Draining, EngineStatus, Heartbeat, ModelInfo, OpenSequence
from gateway.types import PeerKind, PeerState, PeerStatus

log = logging.getLogger(__name__)
HolderT = TypeVar("HolderT")

HEARTBEAT_SECONDS = 2.0
MIN_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 2.0
LEAVE_SECONDS = 2.0
"""How long a peer that is to leave, and has nothing open, may take to end its stream."""


@dataclass(frozen=True)
class Hooks(Generic[HolderT]):
    """What makes a target or a draft out of a peer."""

    kind: PeerKind
    # Describes the peer; raises ConfigurationError if it does not fit.
    handshake: Callable[[Peer[HolderT], grpc.aio.Channel], Awaitable[ModelInfo]]
    # Opens the stream: batches of what we say go in, batches of what the peer says come out.
    converse: Callable[
        [grpc.aio.Channel, AsyncIterator[list[Any]]], AsyncGenerator[list[Any], None]
    ]
    # Told when the stream carries both ways; raises ConfigurationError if the peer does not
    # fit any more. `ready` follows, once sequences can be opened.
    admit: Callable[[Peer[HolderT]], None]
    ready: Callable[[Peer[HolderT]], None]
    # Each reply in order; heartbeats are dealt with here.
    receive: Callable[[Peer[HolderT], Any], None]
    # Nothing more is to be opened; told how many seconds are left, None: as many as it takes.
    draining: Callable[[Peer[HolderT], float | None], None]
    # Told why, and what the peer held.
    lost: Callable[[Peer[HolderT], str, list[HolderT]], None]
    left: Callable[[Peer[HolderT]], None]  # it was told to leave, and has ended


class Peer(Generic[HolderT]):
    """A target or a draft at one address, and the sequences that are open there.

    `holders` maps a sequence id at this peer to whoever opened it; each stream begins with
    an empty one.
    """

    def __init__(
        self, address: str, hooks: Hooks[HolderT], silence_seconds: float, entry: str = ""
    ) -> None:
        self.address = address
        self.entry = entry or address  # what it was configured by; kept by the roster
        self.leaving = False  # nothing more is opened here, and it ends when nothing is open
        self.model: ModelInfo | None = None
        self.holders: dict[int, HolderT] = {}
        self._state = PeerState.CONNECTING  # of the stream
        self._ending = False  # it leaves, and nothing is open any more
        self._hooks = hooks
        self._silence_seconds = silence_seconds
        self._detail = "not connected yet"
        self._engine: EngineStatus | None = None
        self._round_trip_seconds: float | None = None
        self._outbox: Outbox[Any] = Outbox()
        self._num_streams = 0
        self._num_others = 0  # sequences of other gateways, as last reported
        self._heard_at = 0.0  # monotonic: the engine's last word, or the first open since
        self._beats: dict[int, float] = {}  # serial of an unanswered heartbeat -> sent at
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())
        self._task.add_done_callback(self._done)

    async def stop(self) -> None:
        """End the stream; what is open there is closed by the peer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reconnect(self) -> None:
        """End this stream and begin anew with the handshake."""
        self._outbox.close()

    def leave(self) -> None:
        """Open nothing more here, and end once nothing is open."""
        self.leaving = True
        if self._state is PeerState.READY:
            self._hooks.draining(self, None)
        self._end_if_over()

    def stay(self) -> bool:
        """Take back `leave`; returns whether that could be done.

        It can't once the connection ends, nor while the peer would not be admitted any more.
        """
        if self._ending:
            return False
        if self._state is PeerState.READY:
            try:
                self._hooks.admit(self)
            except ConfigurationError as error:
                self._detail = f"finishes, then connects anew: {error}"
                return False
            self._detail = ""
        self.leaving = False
        if self._state is PeerState.READY:
            self._hooks.ready(self)
        return True

    @property
    def kind(self) -> PeerKind:
        """Target or draft."""
        return self._hooks.kind

    @property
    def state(self) -> PeerState:
        """How things stand; one that leaves drains."""
        leaves = self.leaving and self._state is PeerState.READY
        return PeerState.DRAINING if leaves else self._state

    @property
    def detail(self) -> str:
        """Why, in words; empty if it is ready."""
        return self._detail or (f"gone from {self.entry}" if self.leaving else "")

    @property
    def ready(self) -> bool:
        """Whether sequences can be opened here."""
        return self.state is PeerState.READY

    @property
    def stream(self) -> tuple[object, int]:
        """Names the present stream, among all peers and times."""
        return self, self._num_streams

    @property
    def load(self) -> int:
        """Sequences there: ours as of now, those of other gateways as last reported."""
        return len(self.holders) + self._num_others

    def status(self) -> PeerStatus:
        """How things stand."""
        origin = f"from {self.entry}" if self.entry != self.address and not self.leaving else ""
        return PeerStatus(
            kind=self._hooks.kind,
            address=self.address,
            state=self.state,
            detail="; ".join(filter(None, (self.detail, origin))),
            model=self.model,
            engine=self._engine,
            round_trip_seconds=self._round_trip_seconds,
            num_sequences=len(self.holders),
        )

    def send(self, item: Any) -> None:
        """Say something on the stream."""
        self._outbox.put(item)

    def open(self, holder: HolderT, sequence: OpenSequence) -> None:
        """Open a sequence for its holder."""
        if not self.holders:
            self._heard_at = time.monotonic()
        self.holders[sequence.sequence_id] = holder
        self.send(sequence)

    def close(self, sequence_id: int) -> None:
        """Close a sequence, unless it has ended."""
        if self.holders.pop(sequence_id, None) is not None:
            self.send(CloseSequence(sequence_id))
            self._end_if_over()

    def ended(self, sequence_id: int) -> None:
        """The peer has ended a sequence."""
        self.holders.pop(sequence_id, None)
        self._end_if_over()

    def _end_if_over(self) -> None:
        """End the connection of a peer that leaves, if nothing is open there."""
        if not self.leaving or self.holders or self._ending or self._task is None:
            return
        self._ending = True
        if self._state in (PeerState.READY, PeerState.DRAINING):
            self._outbox.close()  # what is queued is said; the stream ends, and with it the task
            asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._task.cancel)
        else:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("fault of the connection with %s", self.address, exc_info=error)
        if self.leaving:
            self._state = PeerState.CONNECTING
            self._hooks.lost(self, "it has left", [])
            self._hooks.left(self)

    async def _keep_connected(self) -> None:
        backoff = MIN_BACKOFF_SECONDS
        while True:
            state = PeerState.CONNECTING
            try:
                options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(self.address, options) as channel:
                    await self._connect(channel)
                reason = "the peer has ended the stream"
            except ConfigurationError as error:
                state, reason, backoff = PeerState.MISMATCHED, str(error), MAX_BACKOFF_SECONDS
            except UnavailableError as error:
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                reason = connection_failure(details)
                if reason == details:
                    reason = f"{error.code().name}: {details}"
            except Exception:  # ours: without this stream, but not without the gateway
                log.exception("fault on the stream with %s", self.address)
                reason = "a fault of the gateway, see its log"
            if self._state in (PeerState.READY, PeerState.DRAINING):
                backoff = MIN_BACKOFF_SECONDS
            if self._ending:
                return
            self._lose(state, reason)
            if self.leaving:
                return
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _lose(self, state: PeerState, reason: str) -> None:
        if reason != self._detail:
            log.warning("%s at %s: %s", self._hooks.kind.name.lower(), self.address, reason)
        self._state, self._detail = state, reason
        self._engine = self._round_trip_seconds = None
        self._num_others = 0
        self._outbox.close()
        holders, self.holders = list(self.holders.values()), {}
        self._hooks.lost(self, reason, holders)

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        """One stream, until it ends."""
        self.model = await self._hooks.handshake(self, channel)
        self._outbox = Outbox()
        self._num_streams += 1
        self._beats.clear()
        tasks = {
            asyncio.create_task(self._read(channel)),
            asyncio.create_task(self._beat()),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():  # what we say could not be encoded: gRPC's way of telling
                    raise UnavailableError("its call was cancelled here")
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, channel: grpc.aio.Channel) -> None:
        stream = self._hooks.converse(channel, self._outbox.batches())
        try:
            async for replies in stream:
                if self._state in (PeerState.CONNECTING, PeerState.MISMATCHED):
                    # The answer to the first heartbeat: the stream carries both ways.
                    self._hooks.admit(self)
                    self._state, self._detail = PeerState.READY, ""
                    self._heard_at = time.monotonic()
                    if not any(isinstance(reply, Draining) for reply in replies):
                        self._hooks.ready(self)
                for reply in replies:
                    self._hear(reply)
        finally:
            await stream.aclose()

    def _hear(self, reply: Any) -> None:
        if isinstance(reply, Heartbeat):
            sent_at = self._beats.pop(reply.serial, None)
            if sent_at is not None:
                self._round_trip_seconds = time.monotonic() - sent_at
            return
        if isinstance(reply, Draining):
            self._state = PeerState.DRAINING
            self._detail = f"stops within {reply.grace_seconds:.0f} s"
            self._hooks.draining(self, reply.grace_seconds)
            return
        self._heard_at = time.monotonic()
        if isinstance(reply, EngineStatus):
            self._engine = reply
            self._num_others = max(0, reply.num_running + reply.num_waiting - len(self.holders))
        else:
            self._hooks.receive(self, reply)

    async def _beat(self) -> None:
        """Send heartbeats; raises `UnavailableError` when the peer has been silent too long."""
        period = min(HEARTBEAT_SECONDS, self._silence_seconds / 4)
        serial = 0
        while True:
            serial += 1
            self._beats[serial] = time.monotonic()
            self.send(Heartbeat(serial))
            await asyncio.sleep(period)
            late = time.monotonic() - self._silence_seconds
            # A hung engine's service still echoes, so the engine's own word counts too.
            if self.holders and self._heard_at < late:
                raise UnavailableError(f"its engine has said nothing for {self._silence_seconds} s")
            if any(sent_at < late for sent_at in self._beats.values()):
                raise UnavailableError(f"no heartbeat came back for {self._silence_seconds} s")
