"""What a gateway knows of models whose targets come and go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.types import ModelInfo
from gateway.fit import Served
from gateway.fleet import Fleet
from gateway.types import PeerKind
from tests.gateway.fakes import TARGET_MODEL, TOKENIZER


@dataclass
class Target:
    """A target as a fleet sees it."""

    address: str
    entry: str
    model: ModelInfo
    kind: PeerKind = PeerKind.TARGET
    ready: bool = True


@dataclass
class Targets:
    """A roster as a fleet sees it."""

    peers: tuple[Target, ...] = field(default_factory=tuple)

    def remove(self, peer: Target) -> None:
        self.peers = tuple(p for p in self.peers if p is not peer)


def _fleet(*targets: Target) -> Any:
    fleet: Any = Fleet(Targets(targets), Targets())  # type: ignore[arg-type]
    for target in targets:
        fleet.learn(target, Served(target.model, TOKENIZER))
    return fleet


OLD, NEW = (replace(TARGET_MODEL, name=name) for name in ("old", "new"))


def test_a_model_stays_known_after_its_last_target_has_left() -> None:
    fleet = _fleet(old := Target("a:1", "dns:x", OLD), Target("b:1", "dns:y", NEW))
    fleet.remove(old)
    assert {s.model.name for s in fleet._known()} == {"old", "new"}


def test_but_not_once_another_one_stands_in_its_place() -> None:
    """Also one that has been there all the time, under another name."""
    fleet = _fleet(old := Target("a:1", "dns:x", OLD), new := Target("b:1", "dns:y", NEW))
    fleet.remove(old)
    new.entry = "dns:x"
    assert fleet.served("").model.name == "new"
