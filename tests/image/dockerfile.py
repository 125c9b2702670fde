"""The Dockerfile as data, so that the tests take the steps from it and not from memory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV, CACHE = "/opt/tandem", "/var/cache/tandem"  # where images have them


@dataclass(frozen=True)
class Stage:
    """What one stage adds to its parent: (instruction, argument) in order."""

    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, instruction: str) -> list[str]:
        """The arguments of one instruction, in order."""
        return [argument for name, argument in self.steps if name == instruction]


@cache
def stages() -> dict[str, Stage]:
    """Every stage by name."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            parent, name = argument.split(" AS ")
            found[name] = current = Stage(parent)
        elif found:
            current.steps.append((instruction, " ".join(argument.split())))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and those it is built on, the oldest first."""
    chain: list[Stage] = []
    while stage := stages().get(name):
        chain.insert(0, stage)
        name = stage.parent
    return chain


def last(name: str, instruction: str) -> str:
    """What holds in the image of a stage; raises IndexError if nothing does."""
    return [argument for stage in lineage(name) for argument in stage.all_of(instruction)][-1]


def command(name: str) -> list[str]:
    """What a container of this image runs: entry point and default arguments."""
    return [*json.loads(last(name, "ENTRYPOINT")), *json.loads(last(name, "CMD"))]


def environment(name: str) -> dict[str, str]:
    """The variables that the image sets."""
    pairs = " ".join(x for stage in lineage(name) for x in stage.all_of("ENV"))
    return dict(re.findall(r"(\w+)=(\S+)", pairs))
