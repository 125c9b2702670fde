"""What the Dockerfile promises of every image, read off it."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import tomllib

import pytest

from common.config import ModelConfig
from draft_service.config import DraftConfig
from gateway.config import GatewayConfig
from target_service.config import TargetConfig
from tests.image.dockerfile import CACHE, ROOT, VENV, command, environment, last, lineage, stages

IMAGES = {
    "gateway": ("gateway", GatewayConfig, 7070),
    "target": ("target_service", TargetConfig, 7071),
    "draft": ("draft_service", DraftConfig, 7072),
}


@pytest.mark.parametrize("image", IMAGES)
def test_user_entry_point_port_and_writable_folders(image: str) -> None:
    module, config, port = IMAGES[image]
    assert last(image, "USER") == "65532:65532"
    assert json.loads(last(image, "ENTRYPOINT")) == ["python", "-m", module]
    assert last(image, "EXPOSE") == str(port)
    flags = dict(zip(command(image)[3::2], command(image)[4::2], strict=True))
    assert flags.pop("--host") == "0.0.0.0"
    assert flags.pop("--port") == str(port)
    assert flags == ({"--cache-dir": CACHE} if issubclass(config, ModelConfig) else {})
    variables = environment(image)
    assert variables["HOME"] == CACHE
    assert variables["PATH"].startswith(f"{VENV}/bin:")
    # A TANDEM_ variable would win over the chart's configuration file.
    assert not [name for name in variables if name.startswith("TANDEM_")]


@pytest.mark.parametrize("image", IMAGES)
def test_labels_and_nothing_left_of_the_build(image: str) -> None:
    labels = " ".join(x for stage in lineage(image) for x in stage.all_of("LABEL"))
    for name in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels
    for stage in lineage(image):
        assert all("g++" not in step and "pip" not in step for step in stage.all_of("RUN"))
        assert all(copy.startswith("--from=build-") for copy in stage.all_of("COPY"))
        assert not stage.all_of("ADD")


def test_the_version_label_is_the_projects() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"VERSION={version}" in stages()["runtime"].all_of("ARG")


@pytest.mark.parametrize("stage", ["build-gateway", "build-engine"])
def test_all_that_is_installed_goes_through_the_script(stage: str) -> None:
    steps = [x for one in lineage(stage) for x in one.all_of("RUN") if "apt-get" not in x]
    assert len(steps) >= 2
    assert all("docker/install.sh" in step for step in steps)


@pytest.mark.parametrize("stage", ["build-gateway", "build-engine"])
def test_the_build_context_holds_what_is_copied_and_no_more(stage: str) -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {x for one in lineage(stage) for y in one.all_of("COPY") for x in y.split()[:-1]}
    assert copied == allowed
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {name.partition(".")[0] for name in listed["packages"]} - {"tandem"}
    assert rooms | {"protos", "pyproject.toml"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert not any(fnmatch.fnmatch(".git", name) or name == ".venv" for name in allowed)


@pytest.mark.parametrize(
    "args", [[], ["dependencies"], ["dependencies", "database", "x"], ["tandem", "x"], ["rm", "x"]]
)
def test_the_script_refuses_what_it_does_not_know(args: list[str]) -> None:
    done = subprocess.run(
        [str(ROOT / "docker" / "install.sh"), *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "docker/install.sh dependencies gateway|engine VENV" in done.stdout
