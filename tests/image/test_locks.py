"""The lock files say what pyproject.toml and constraints.txt say, each requirement by hash."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.image.dockerfile import ROOT

FOLDER = ROOT / "requirements"
LOCKS = ("gateway", "engine-cpu", "engine-cuda", "build", "model")
PIN = re.compile(r"([a-z0-9.-]+)(?:\[[a-z0-9,-]+\])?==([^\s;]+)(?: ; .+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(lock: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Version and hashes of every package; fails on a line that is anything else."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    name = ""
    for line in (FOLDER / f"{lock}.lock").read_text().splitlines():
        if line.lstrip().startswith("#") or not line:
            continue
        if HASH.fullmatch(line):
            version, hashes = found[name]
            found[name] = (version, hashes | {line.split()[0]})
        else:
            pin = PIN.fullmatch(line)
            assert pin, f"{lock}.lock: {line!r} is neither a pinned requirement nor a hash"
            name = pin[1]
            assert name not in found
            found[name] = (pin[2], frozenset())
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_has_hashes_and_the_version_of_the_constraints(lock: str) -> None:
    locked, wanted = pins(lock), constraints()
    assert locked
    assert not [name for name, (_, hashes) in locked.items() if not hashes]
    differing = {
        name: (version, wanted[name])
        for name, (version, _) in locked.items()
        if wanted.get(name, version) != version
    }
    assert not differing, "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_no_place_of_a_registry_or_machine_is_named(lock: str) -> None:
    text = (FOLDER / f"{lock}.lock").read_text()
    assert not re.search(r"://|--(?!hash=sha256)|@ |/home|/root|/tmp|/work", text)


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("gateway", []), ("engine-cpu", ["engine"]), ("engine-cuda", ["engine"])],
)
def test_what_pyproject_asks_for_is_there(lock: str, extras: list[str]) -> None:
    optional = PROJECT["project"]["optional-dependencies"]
    asked = PROJECT["project"]["dependencies"] + [x for name in extras for x in optional[name]]
    locked = pins(lock)
    assert len(asked) > 10
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name == "torch" and lock == "engine-cpu":
            continue  # see docker/install.sh
        assert name in locked, f"{name} is in no {lock}.lock: run `make lock`"
        assert requirement.specifier.contains(locked[name][0]), "run `make lock`"


def test_the_locks_agree_and_differ_in_torch_only() -> None:
    gateway, cpu, cuda = pins("gateway"), pins("engine-cpu"), pins("engine-cuda")
    assert gateway.items() <= cpu.items() <= cuda.items()
    assert not {"torch", "transformers", "triton", "safetensors"} & gateway.keys()
    assert not [x for x in cpu if x in {"torch", "triton"} or x.startswith(("nvidia", "cuda"))]
    cuda_only = cuda.keys() - cpu.keys()
    assert {"torch", "triton", "nvidia-cublas"} <= cuda_only
    stems = ("torch", "triton", "nvidia-", "cuda-")
    assert not [name for name in cuda_only if not name.startswith(stems)]


def test_what_uv_is_told_of_the_cpu_torch_is_so() -> None:
    (told,) = tomllib.loads((FOLDER / "torch-cpu.toml").read_text())["dependency-metadata"]
    assert told["version"] == constraints()["torch"]
    needed = {
        str(x)
        for x in map(Requirement, requires("torch") or [])
        if "extra" not in str(x.marker) and not x.name.startswith(("nvidia", "triton", "cuda"))
    }
    assert {str(Requirement(x)) for x in told["requires-dist"]} == needed


def test_what_builds_the_wheel_and_which_model_are_named_once() -> None:
    lines = {
        name: [x for x in (FOLDER / name).read_text().splitlines() if not x.startswith("#")]
        for name in ("build.in", "model.in")
    }
    assert lines["build.in"] == PROJECT["build-system"]["requires"]
    (model,) = lines["model.in"]
    assert model in (ROOT / "Makefile").read_text()
    assert model in (ROOT / "common" / "engine" / "loader.py").read_text()
