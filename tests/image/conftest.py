"""The images' environments, made by the steps that the Dockerfile takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.contained import Place
from tests.image.dockerfile import ROOT, VENV, lineage

BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"


def built(stage: str, folder: Path) -> Place:
    """Take a build stage's COPY and RUN steps, less Debian's packages, in a folder of its own.

    RUN lines are run as they stand, with this folder's `venv` for the image's.
    """
    source, venv = folder / "src", folder / "venv"
    source.mkdir()
    settings = {"PYTHON": str(BASE_PYTHON), "HOME": os.environ.get("HOME", "/"), "PIP_RETRIES": "1"}
    env = {name: x for name, x in os.environ.items() if name.startswith(("PIP_", "SSL_", "PATH"))}
    for instruction, argument in [x for y in lineage(stage) for x in y.steps]:
        if instruction == "ARG" and "=" in argument:
            name, _, value = argument.partition("=")
            settings[name] = value
        elif instruction == "COPY":
            *names, target = argument.split()
            for name in names:
                _copy(ROOT / name, source / (name if target == "./" else target))
        elif instruction == "RUN" and "apt-get" not in argument:
            script = argument.replace(VENV, str(venv))
            subprocess.run(["/bin/sh", "-ec", script], cwd=source, env=env | settings, check=True)
    shutil.rmtree(source)
    return Place(venv, folder / "work")


def _copy(origin: Path, target: Path) -> None:
    if origin.is_dir():
        shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy(origin, target)


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """A folder that every user may read, unlike pytest's own; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def gateway_image(shared_folder: Path) -> Place:
    """What the gateway's image holds."""
    folder = shared_folder / "gateway"
    folder.mkdir()
    return built("build-gateway", folder)


@pytest.fixture(scope="session")
def engine_image(shared_folder: Path) -> Place:
    """What the images of target and draft hold, for CPUs."""
    folder = shared_folder / "engine"
    folder.mkdir()
    return built("build-engine", folder)
