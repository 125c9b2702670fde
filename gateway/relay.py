"""Joins clients' sessions with targets and drafts: who is connected, who hears what.

Everything runs in the event loop's thread; a reader never waits for a client.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

from common import wire
from common.errors import CapacityError, UnavailableError
from common.metrics import Metrics
from common.types import Commit, ModelInfo, Progress, Proposal, Refusal, Verdict
from gateway.config import GatewayConfig
from gateway.discovery import Entry, Lookup
from gateway.failover import Failover
from gateway.fit import Served, checked_tokenizer
from gateway.fleet import RETRY_SECONDS, Fleet
from gateway.metrics import GatewayMetrics
from gateway.peer import Hooks, Peer
from gateway.records import Journal, RequestRecord
from gateway.resolver import Resolver
from gateway.roster import Roster
from gateway.session import Session
from gateway.spans import RequestSpans
from gateway.types import GenerationRequest, PeerKind, PeerStatus

HANDSHAKE_SECONDS = 10.0


class Relay:
    """All sessions of a gateway and the peers that serve them.

    Belongs to the event loop that it is made in; `failed` never ends, since there is no
    engine here that could. lookup: what looks names up; None: the name servers.
    """

    def __init__(self, config: GatewayConfig, lookup: Lookup | None = None) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self._lookup = lookup
        self.metrics = GatewayMetrics(Metrics(config.name, config.pool))
        self.journal = Journal()
        self._ids = itertools.count(1)  # sequence ids, new for every attempt
        self._sessions: set[Session] = set()
        self._draining = False
        self._target_met = asyncio.Event()
        self._target_ready = asyncio.Event()
        targets = Hooks(
            kind=PeerKind.TARGET,
            handshake=self._meet_target,
            converse=_verify,
            admit=self._admit_target,
            ready=self._welcome_target,
            receive=self._hear_target,
            draining=self._drain_target,
            lost=self._lose_target,
            left=self._remove,
        )
        drafts = Hooks(
            kind=PeerKind.DRAFT,
            handshake=self._meet_draft,
            converse=_propose,
            admit=lambda draft: None,
            ready=self._welcome_draft,
            receive=self._hear_draft,
            draining=self._drain_draft,
            lost=self._lose_draft,
            left=self._remove,
        )
        self._rosters = (
            self._roster(targets, config.target_entries),
            self._roster(drafts, config.draft_entries),
        )
        self._fleet = Fleet(*self._rosters)
        self._failover = Failover(self._fleet, config.failover_seconds, self._reopen)
        self.metrics.watch(self._fleet.standings, self._live_of, self._fleet.failing)

    def _roster(self, hooks: Hooks[Session], entries: Sequence[Entry]) -> Roster:
        silence = self._config.silence_seconds
        return Roster(hooks.kind, entries, lambda address, e: Peer(address, hooks, silence, e))

    def start(self) -> None:
        """Begin to look names up and to connect."""
        entries = (*self._config.target_entries, *self._config.draft_entries)
        if self._lookup is None and any(entry.name for entry in entries):
            self._lookup = Resolver(self._config.nameserver).lookup
        for roster in self._rosters:
            roster.start(self._lookup, self._config.discovery_seconds)

    async def wait_for_target(self) -> None:
        """Return once a target has connected."""
        await self._target_ready.wait()

    def drain(self, grace_seconds: float = 0.0) -> None:
        """Take no new request; live ones go on."""
        self._draining = True

    async def stop(self) -> None:
        """End what is left."""
        self.drain()
        for session in list(self._sessions):
            self._failover.forget(session)
            session.fail(UnavailableError("the gateway stops", retry_after_seconds=RETRY_SECONDS))
        for roster in self._rosters:
            await roster.stop()

    def num_live(self) -> int:
        """How many requests are not finished."""
        return len(self._sessions)

    def status(self) -> tuple[PeerStatus, ...]:
        """How things stand with the peers, targets first."""
        return self._fleet.status()

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for now."""
        return self._fleet.models()

    @property
    def max_lookahead(self) -> int:
        """How far a draft may be ahead; 0 without one."""
        return self._config.lookahead if self._config.drafts else 0

    def served(self, name: str) -> Served:
        """The model of that name, or the only one if the name is empty.

        Raises `NotFoundError`, `InvalidRequestError` if there are several to choose from, or
        `UnavailableError` if no target is there.
        """
        if self._draining:
            raise UnavailableError("the gateway stops", retry_after_seconds=RETRY_SECONDS)
        return self._fleet.served(name)

    def open(
        self,
        request: GenerationRequest,
        arrived_at: float | None = None,
        spans: RequestSpans | None = None,
        fork_of: Session | None = None,
    ) -> Session:
        """Begin a request; whoever opens a session closes it in the end.

        fork_of: a session with the same prompt, whose target is taken if that can be.
        Raises `CapacityError`, or `UnavailableError` if no target is there.
        """
        self.served(request.model.name)
        if len(self._sessions) >= self._config.max_live_requests:
            raise CapacityError(
                f"{len(self._sessions)} requests are live, as many as this gateway serves",
                retry_after_seconds=RETRY_SECONDS,
            )
        if arrived_at is None:
            arrived_at = time.monotonic()
        session = Session(request, arrived_at, self.metrics, spans)
        parent = fork_of.target if fork_of is not None and not fork_of.ended else None
        if parent is not None and not parent.ready:
            parent = None
        target = parent or self._fleet.target_for(session)
        if target is None:
            raise UnavailableError(
                f"no target is ready: {self._fleet.why_none(request)}",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._sessions.add(session)
        forked = fork_of.target_id if fork_of is not None and parent is not None else 0
        session.open_at(target, next(self._ids), fork_of=forked)
        self.metrics.opened(request.model.name, len(request.prompt))
        self._attach(session, "first")
        return session

    def close(self, session: Session) -> None:
        """The client has what it wanted, or is gone."""
        session.close()
        self._failover.forget(session)
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        record = self.record(session)
        self.metrics.ended(record)
        prompt = ""
        if self._config.log_prompts:
            fleet, model = self._fleet, session.request.model
            served = fleet.at(session.last_target) or fleet.with_tokenizer(
                model.tokenizer_fingerprint
            )
            prompt = served.tokenizer.decode(session.request.prompt) if served else ""
        self.journal.add(record, prompt)

    def refused(self) -> None:
        """A request has not been opened."""
        names = [model.name for model in self.models()]
        self.metrics.refused(names[0] if len(names) == 1 else "")

    def record(self, session: Session) -> RequestRecord:
        """A request's figures, with what is known of its peers."""
        target, draft = session.last_target, session.last_draft
        return replace(
            session.record(),
            has_draft=bool(self._config.drafts),
            draft_round_trip_seconds=draft.status().round_trip_seconds if draft else None,
            target_round_trip_seconds=target.status().round_trip_seconds if target else None,
        )

    def _live_of(self) -> list[str]:
        """The model of each live request; asked for in another thread."""
        return [session.request.model.name for session in list(self._sessions)]

    def _remove(self, peer: Peer[Session]) -> None:
        self._fleet.remove(peer)

    def _reopen(self, session: Session, target: Peer[Session], reason: str) -> None:
        session.open_at(target, next(self._ids), reason)
        self.metrics.reopened(session.request.model.name, reason)
        self._attach(session, reason)

    def _attach(self, session: Session, reason: str) -> bool:
        if not session.wants_draft or (draft := self._fleet.draft_for(session)) is None:
            return False
        session.attach(draft, next(self._ids), reason)
        return True

    def _attach_again(self, session: Session, reason: str) -> None:
        if self._attach(session, reason):
            self.metrics.reopened(session.request.model.name, reason)

    # -- targets -----------------------------------------------------------------------

    async def _meet_target(self, target: Peer[Session], channel: grpc.aio.Channel) -> ModelInfo:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        described = await stub.GetModel(
            target_pb2.TargetServiceGetModelRequest(), timeout=HANDSHAKE_SECONDS
        )
        model = wire.model_from_pb(described.model)
        self._fleet.check_target(target, model, self._failover.awaited())
        known = self._fleet.at(target)
        if known is None or model != known.model:
            known = self._fleet.with_tokenizer(model.tokenizer_fingerprint)
            if known is None:
                answer = await stub.GetTokenizer(
                    target_pb2.GetTokenizerRequest(), timeout=HANDSHAKE_SECONDS
                )
                tokenizer = checked_tokenizer(model, dict(answer.files))
            else:
                tokenizer = known.tokenizer
            self._fleet.learn(target, Served(model, tokenizer))
        self._target_met.set()
        return model

    def _admit_target(self, target: Peer[Session]) -> None:
        assert target.model is not None, "the handshake is over"
        self._fleet.check_target(target, target.model, self._failover.awaited())

    def _welcome_target(self, target: Peer[Session]) -> None:
        self._target_ready.set()
        self._failover.target_ready()

    def _hear_target(self, target: Peer[Session], reply: Verdict | Progress) -> None:
        session = target.holders.get(reply.sequence_id)
        if session is None:
            return  # closed in the meantime, or open elsewhere by now
        if isinstance(reply, Progress):
            session.take_progress(reply)
            return
        if reply.ended:
            target.ended(reply.sequence_id)
        if reply.error is None or not self._failover.refused(session, target, reply.error):
            session.take_verdict(reply)

    def _drain_target(self, target: Peer[Session], grace_seconds: float | None) -> None:
        if grace_seconds is not None:
            self._failover.drain(target, grace_seconds)

    def _lose_target(self, target: Peer[Session], reason: str, held: list[Session]) -> None:
        self._failover.target_gone(target)
        for session in held:
            self._failover.lose(session, target, reason)

    # -- drafts ------------------------------------------------------------------------

    async def _meet_draft(self, draft: Peer[Session], channel: grpc.aio.Channel) -> ModelInfo:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        described = await stub.GetModel(
            draft_pb2.DraftServiceGetModelRequest(), timeout=HANDSHAKE_SECONDS
        )
        model = wire.model_from_pb(described.model)
        await self._target_met.wait()
        self._fleet.check_draft(model)
        return model

    def _welcome_draft(self, draft: Peer[Session]) -> None:
        for session in self._sessions:
            self._attach_again(session, "draft_returned")

    def _hear_draft(self, draft: Peer[Session], reply: Proposal | Refusal) -> None:
        session = draft.holders.get(reply.sequence_id)
        if session is None:
            return  # closed in the meantime
        if isinstance(reply, Proposal):
            session.take_proposal(reply)
            return
        draft.ended(reply.sequence_id)
        session.avoided.add(draft.stream)
        session.detach(message=reply.error.message)
        self._attach_again(session, "draft_refused")

    def _drain_draft(self, draft: Peer[Session], grace_seconds: float | None) -> None:
        for session in list(draft.holders.values()):
            if self._fleet.draft_for(session) is not None:
                session.detach()
                self._attach_again(session, "draft_draining")

    def _lose_draft(self, draft: Peer[Session], reason: str, held: list[Session]) -> None:
        for session in held:
            session.detach("tandem.draft_lost", reason)
            self._attach_again(session, "draft_lost")


def merge_commits(items: list[Any]) -> list[Any]:
    """The same batch with one commit for each sequence, where its first one was."""
    merged: list[Any] = []
    places: dict[int, int] = {}
    for item in items:
        if not isinstance(item, Commit):
            merged.append(item)
        elif item.sequence_id in places:
            earlier: Commit = merged[places[item.sequence_id]]
            token_ids = earlier.token_ids + item.token_ids
            merged[places[item.sequence_id]] = replace(
                item, committed_len=earlier.committed_len, token_ids=token_ids
            )
        else:
            places[item.sequence_id] = len(merged)
            merged.append(item)
    return merged


async def _verify(
    channel: grpc.aio.Channel, batches: AsyncIterator[list[Any]]
) -> AsyncGenerator[list[Any], None]:
    requests = (wire.verify_request(batch) async for batch in batches)
    call = target_pb2_grpc.TargetServiceStub(channel).Verify(requests)
    try:
        async for response in call:
            yield list(wire.target_replies(response))
    finally:
        call.cancel()


async def _propose(
    channel: grpc.aio.Channel, batches: AsyncIterator[list[Any]]
) -> AsyncGenerator[list[Any], None]:
    requests = (wire.propose_request(merge_commits(batch)) async for batch in batches)
    call = draft_pb2_grpc.DraftServiceStub(channel).Propose(requests)
    try:
        async for response in call:
            yield list(wire.draft_replies(response))
    finally:
        call.cancel()
