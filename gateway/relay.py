"""Joins clients' sessions with targets and drafts: who is connected, who hears what.

This slice has one target and at most one draft. Everything runs in the event loop's
thread; a reader never waits for a client.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

from common import wire
from common.errors import CapacityError, ConfigurationError, NotFoundError, UnavailableError
from common.metrics import Metrics
from common.tokenizer import Tokenizer
from common.types import Commit, ModelInfo, Progress, Proposal, Refusal, Verdict
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.peer import Hooks, Peer
from gateway.records import Journal, RequestRecord
from gateway.session import Session
from gateway.spans import RequestSpans
from gateway.types import GenerationRequest, PeerKind, PeerStatus

HANDSHAKE_SECONDS = 10.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Served:
    """A model that can be asked for, and its tokenizer."""

    model: ModelInfo
    tokenizer: Tokenizer


class Relay:
    """All sessions of a gateway and the peers that serve them.

    Belongs to the event loop that it is made in; `failed` never ends, since there is no
    engine here that could.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self.metrics = GatewayMetrics(Metrics(config.name, config.pool))
        self.metrics.watch(self.status, self.num_live)
        self.journal = Journal()
        self._ids = itertools.count(1)  # sequence ids, new for every attempt
        self._sessions: set[Session] = set()
        self._draining = False
        self._served: Served | None = None  # of the last target that has connected
        self._target_met = asyncio.Event()
        self._target_ready = asyncio.Event()
        self._target: Peer[Session] = Peer(
            config.target,
            Hooks(
                kind=PeerKind.TARGET,
                handshake=self._meet_target,
                converse=_verify,
                ready=self._target_ready.set,
                receive=self._hear_target,
                lost=self._lose_target,
            ),
            config.silence_seconds,
        )
        self._draft: Peer[Session] | None = None
        if config.draft:
            self._draft = Peer(
                config.draft,
                Hooks(
                    kind=PeerKind.DRAFT,
                    handshake=self._meet_draft,
                    converse=_propose,
                    ready=self._attach_all,
                    receive=self._hear_draft,
                    lost=self._lose_draft,
                ),
                config.silence_seconds,
            )

    def start(self) -> None:
        """Begin to connect."""
        for peer in self._peers():
            peer.start()

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
            session.fail(UnavailableError("the gateway stops", retry_after_seconds=RETRY_SECONDS))
        for peer in self._peers():
            await peer.stop()

    def num_live(self) -> int:
        """How many requests are not finished."""
        return len(self._sessions)

    def status(self) -> tuple[PeerStatus, ...]:
        """How things stand with the peers."""
        return tuple(peer.status() for peer in self._peers())

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for now."""
        return (self._served.model,) if self._served and self._target.ready else ()

    @property
    def max_lookahead(self) -> int:
        """How far a draft may be ahead; 0 without one."""
        return self._config.lookahead if self._draft is not None else 0

    def served(self, name: str) -> Served:
        """The model of that name, or the only one if the name is empty.

        Raises `NotFoundError`, or `UnavailableError` if no target is there.
        """
        if self._draining:
            raise UnavailableError("the gateway stops", retry_after_seconds=RETRY_SECONDS)
        if self._served is not None and name not in ("", self._served.model.name):
            raise NotFoundError(
                f'"{name}" is not served; there is "{self._served.model.name}"', field="model"
            )
        if self._served is None or not self._target.ready:
            raise UnavailableError(
                f"no target is ready: {self._target.status().detail}",
                retry_after_seconds=RETRY_SECONDS,
            )
        return self._served

    def open(
        self,
        request: GenerationRequest,
        arrived_at: float | None = None,
        spans: RequestSpans | None = None,
        fork_of: Session | None = None,
    ) -> Session:
        """Begin a request; whoever opens a session closes it in the end.

        fork_of is a session with the same prompt whose blocks this one may share.
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
        parent_id = fork_of.target_id if fork_of is not None else 0
        session = Session(
            request, self._target, next(self._ids), arrived_at, self.metrics, spans, parent_id
        )
        self._sessions.add(session)
        self._attach(session)
        return session

    def close(self, session: Session) -> None:
        """The client has what it wanted, or is gone."""
        session.close()
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        record = self.record(session)
        self.metrics.ended(record)
        prompt = ""
        if self._config.log_prompts and self._served is not None:
            prompt = self._served.tokenizer.decode(session.request.prompt)
        self.journal.add(record, prompt)

    def refused(self) -> None:
        """A request has not been opened."""
        self.metrics.refused(self._served.model.name if self._served else "")

    def record(self, session: Session) -> RequestRecord:
        """A request's figures, with what is known of its peers."""
        draft = self._draft
        return replace(
            session.record(),
            has_draft=draft is not None,
            draft_round_trip_seconds=draft.status().round_trip_seconds if draft else None,
            target_round_trip_seconds=self._target.status().round_trip_seconds,
        )

    def _peers(self) -> list[Peer[Session]]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _attach(self, session: Session) -> bool:
        if self._draft is None or not self._draft.ready or not session.wants_draft:
            return False
        session.attach(self._draft, next(self._ids))
        return True

    def _attach_all(self) -> None:
        for session in self._sessions:
            if self._attach(session):
                self.metrics.reopened(session.request.model.name, "draft_returned")

    async def _meet_target(self, channel: grpc.aio.Channel) -> ModelInfo:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        described = await stub.GetModel(
            target_pb2.TargetServiceGetModelRequest(), timeout=HANDSHAKE_SECONDS
        )
        model = wire.model_from_pb(described.model)
        before = self._served.model if self._served else None
        if self._served is None or model != before:
            answer = await stub.GetTokenizer(
                target_pb2.GetTokenizerRequest(), timeout=HANDSHAKE_SECONDS
            )
            self._served = Served(model, _checked_tokenizer(model, dict(answer.files)))
            if self._draft is not None and before is not None:
                self._draft.reconnect()  # it may not fit any more
        self._target_met.set()
        return model

    async def _meet_draft(self, channel: grpc.aio.Channel) -> ModelInfo:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        described = await stub.GetModel(
            draft_pb2.DraftServiceGetModelRequest(), timeout=HANDSHAKE_SECONDS
        )
        model = wire.model_from_pb(described.model)
        await self._target_met.wait()
        assert self._served is not None
        check_fit(model, self._served.model, self._served.tokenizer.num_ids)
        return model

    def _hear_target(self, reply: Verdict | Progress) -> None:
        session = self._target.holders.get(reply.sequence_id)
        if session is None:
            return  # closed in the meantime
        if isinstance(reply, Progress):
            session.take_progress(reply)
            return
        if reply.ended:
            del self._target.holders[reply.sequence_id]
        session.take_verdict(reply)

    def _hear_draft(self, reply: Proposal | Refusal) -> None:
        assert self._draft is not None
        session = self._draft.holders.get(reply.sequence_id)
        if session is None:
            return  # closed in the meantime
        if isinstance(reply, Proposal):
            session.take_proposal(reply)
            return
        del self._draft.holders[reply.sequence_id]
        session.detach(message=reply.error.message)

    def _lose_target(self, reason: str, held: list[Session]) -> None:
        for session in held:
            error = UnavailableError(
                f"the target at {self._target.address} was lost: {reason}",
                retry_after_seconds=RETRY_SECONDS,
            )
            session.fail(error, at_target="tandem.target_lost")

    def _lose_draft(self, reason: str, held: list[Session]) -> None:
        for session in held:
            session.detach("tandem.draft_lost", reason)


def check_fit(draft: ModelInfo, target: ModelInfo, num_ids: int) -> None:
    """Raises `ConfigurationError` if a draft's guesses would mean something else.

    num_ids is the size of the target's tokenizer; models often pad their logits beyond it.
    """
    if draft.vocab_size == 0:
        return  # it only repeats ids that it has seen
    if not draft.tokenizer_fingerprint or (
        draft.tokenizer_fingerprint != target.tokenizer_fingerprint
    ):
        raise ConfigurationError(
            f'drafts speak another vocabulary: "{draft.name}" has tokenizer'
            f' "{draft.tokenizer_fingerprint}", the target "{target.name}" has'
            f' "{target.tokenizer_fingerprint}"'
        )
    if draft.vocab_size < min(target.vocab_size, num_ids):
        raise ConfigurationError(
            f'the draft "{draft.name}" knows {draft.vocab_size} token ids,'
            f" the tokenizer has {num_ids}"
        )
    if draft.noise_version and draft.noise_version != target.noise_version:
        raise ConfigurationError(
            f'drafts draw other noise: "{draft.noise_version}", the target "{target.noise_version}"'
        )


def _checked_tokenizer(model: ModelInfo, files: dict[str, bytes]) -> Tokenizer:
    tokenizer = Tokenizer(files)
    if model.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
        raise ConfigurationError(
            f"the target's tokenizer files are {tokenizer.fingerprint},"
            f" its model needs {model.tokenizer_fingerprint}"
        )
    return tokenizer


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
