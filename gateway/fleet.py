"""The targets and drafts of a gateway: what they serve, and which one takes a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.errors import (
    ConfigurationError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from common.types import ModelInfo
from gateway.fit import Served, check_fit, difference, fits
from gateway.peer import Peer
from gateway.roster import Roster
from gateway.router import Candidate, Router, prefix_keys
from gateway.session import Session
from gateway.types import GenerationRequest, PeerKind, PeerStatus, Standing

RETRY_SECONDS = 1.0


class Fleet:
    """All peers.

    A name stands for one model: while a target that is ready serves it, or a request waits for
    one that does (`reserved`), a target that would answer differently under that name is not
    taken. When the last one is gone or drains, the name is free for another model.
    """

    def __init__(self, targets: Roster, drafts: Roster) -> None:
        self._targets = targets
        self._drafts = drafts
        self._served: dict[str, Served] = {}  # by address: of the last connection there
        self._left: dict[str, Served] = {}  # by entry: of its last target, which has left
        self._router = Router()
        self._draft_router = Router()

    @property
    def targets(self) -> tuple[Peer[Session], ...]:
        """Those that there are now."""
        return self._targets.peers

    @property
    def drafts(self) -> tuple[Peer[Session], ...]:
        """Those that there are now."""
        return self._drafts.peers

    def status(self) -> tuple[PeerStatus, ...]:
        """How things stand, targets first; entries that stand for no peer are told as well."""
        told: list[PeerStatus] = []
        for roster in (self._targets, self._drafts):
            told += [peer.status() for peer in roster.peers]
            told += roster.vacant()
        return tuple(told)

    def failing(self) -> dict[str, int]:
        """How many names can't be looked up now, by kind of peer."""
        return {"target": self._targets.num_failing, "draft": self._drafts.num_failing}

    def remove(self, peer: Peer[Session]) -> None:
        """A peer that was to leave has ended; what it served stays known until another comes."""
        if peer.kind is PeerKind.DRAFT:
            self._drafts.remove(peer)
            return
        self._targets.remove(peer)
        served = self._served.pop(peer.address, None)
        siblings = (t for t in self.targets if t.entry == peer.entry and self.at(t) is not None)
        if served is not None and next(siblings, None) is None:
            self._left[peer.entry] = served

    # -- what is served ----------------------------------------------------------------

    def at(self, target: Peer[Session] | None) -> Served | None:
        """What a target serves, or served last."""
        return self._served.get(target.address) if target is not None else None

    def with_tokenizer(self, fingerprint: str) -> Served | None:
        """Something known that has this tokenizer."""
        known = (s for s in self._known() if s.tokenizer.fingerprint == fingerprint)
        return next(known, None)

    def learn(self, target: Peer[Session], served: Served) -> None:
        """A target has said what it serves; drafts that fit nothing any more are checked again."""
        before = self._served.get(target.address)
        self._served[target.address] = served
        self._left.pop(target.entry, None)
        if before is not None and before.model == served.model:
            return
        for draft in self.drafts:
            if draft.ready and not self._fits_any(draft.model):
                draft.reconnect()

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for now, one of each name."""
        ready = (self._served[t.address].model for t in self.targets if t.ready)
        return tuple({model.name: model for model in ready}.values())

    def served(self, name: str) -> Served:
        """The model of that name, or the only one if the name is empty.

        Raises `NotFoundError`, `InvalidRequestError` if there are several to choose from, or
        `UnavailableError` if no target is there.
        """
        known = sorted({s.model.name for s in self._known()})
        if name and known and name not in known:
            told = ", ".join(f'"{other}"' for other in known)
            raise NotFoundError(f'"{name}" is not served; there is {told}', field="model")
        if not name and len(known) > 1:
            told = ", ".join(f'"{other}"' for other in known)
            raise InvalidRequestError(f"is empty, must be one of {told}", field="model")
        for target in self.targets:
            if target.ready and name in ("", self._served[target.address].model.name):
                return self._served[target.address]
        raise UnavailableError(
            f"no target is ready: {self._details()}", retry_after_seconds=RETRY_SECONDS
        )

    def check_target(
        self, target: Peer[Session], model: ModelInfo, reserved: Iterable[ModelInfo]
    ) -> None:
        """Raises `ConfigurationError` if its name stands for a model with other answers."""
        others = [
            (f"the target at {t.address}", self._served[t.address].model)
            for t in self.targets
            if t is not target and t.ready
        ]
        others += [("a request that waits for its target", m) for m in reserved]
        for who, other in others:
            if other.name == model.name and (told := difference(model, other)):
                raise ConfigurationError(
                    f'it would answer differently from {who} under the name "{model.name}": {told}'
                )

    def check_draft(self, model: ModelInfo) -> None:
        """Raises `ConfigurationError` if a draft fits no target; there is one."""
        if not self._fits_any(model):
            served = self._known()[0]
            check_fit(model, served.model, served.tokenizer.num_ids)

    # -- who takes it ------------------------------------------------------------------

    def target_for(self, session: Session) -> Peer[Session] | None:
        """A target for a session's next tokens; None if none is ready that answers the same."""
        request = session.request
        candidates = [
            Candidate(t.address, t.state, t.load, self._may_serve(t, session)) for t in self.targets
        ]
        scope = f"{request.model.weights_fingerprint} {request.cache_scope}"
        chosen = self._router.choose(candidates, prefix_keys(scope, request.prompt))
        return next((t for t in self.targets if t.address == chosen), None)

    def draft_for(self, session: Session) -> Peer[Session] | None:
        """The least loaded draft that may guess for a session; None if none is ready."""
        served = self.at(session.target)
        candidates = [
            Candidate(
                d.address,
                d.state,
                d.load,
                d.stream not in session.avoided and fits(d.model, served),
            )
            for d in self.drafts
        ]
        chosen = self._draft_router.choose(candidates)
        return next((d for d in self.drafts if d.address == chosen), None)

    def why_none(self, request: GenerationRequest) -> str:
        """Why no target answers a request the same."""
        told = []
        for target in self.targets:
            served = self.at(target)
            other = difference(served.model, request.model) if served and target.ready else ""
            told.append(f"{target.address} {other}" if other else _told(target))
        return "; ".join([*told, *map(_told_vacant, self._targets.vacant())])

    def standings(self) -> Iterator[Standing]:
        """What there is for each model; without any, under an empty name."""
        served: dict[str, Served | None]
        served = {s.model.name: s for s in self._known()} or {"": None}
        for name, one in served.items():
            targets = [
                t
                for t in self.targets
                if one is None or ((s := self.at(t)) is not None and s.model.name == name)
            ]
            drafts = [d for d in self.drafts if one is None or fits(d.model, one)]
            yield Standing(
                model=name,
                num_targets=sum(t.ready for t in targets),
                num_drafts=sum(d.ready for d in drafts) if self._drafts.configured else None,
                target_round_trip_seconds=_farthest(targets),
                draft_round_trip_seconds=_farthest(drafts),
            )

    def _may_serve(self, target: Peer[Session], session: Session) -> bool:
        served = self.at(target)
        if served is None or target.stream in session.avoided:
            return False
        return not difference(served.model, session.request.model)

    def _fits_any(self, draft: ModelInfo | None) -> bool:
        return any(fits(draft, served) for served in self._known())

    def _known(self) -> list[Served]:
        """What targets serve or served last; safe in a scrape's thread."""
        served, left = dict(self._served), dict(self._left)
        filled = {t.entry for t in self.targets if t.address in served}
        return [*served.values(), *(s for entry, s in left.items() if entry not in filled)]

    def _details(self) -> str:
        return "; ".join([*map(_told, self.targets), *map(_told_vacant, self._targets.vacant())])


def _told(peer: Peer[Session]) -> str:
    return f"{peer.address}: {peer.detail or 'is ready'}"


def _told_vacant(entry: PeerStatus) -> str:
    return f"{entry.address}: {entry.detail}"


def _farthest(peers: Iterable[Peer[Session]]) -> float | None:
    known = [t for p in peers if (t := p.status().round_trip_seconds) is not None]
    return max(known, default=None)
