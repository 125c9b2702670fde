"""What the chart's README tells a new user to do, done; and what it says comes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from helm.values_table import README
from tests.chart.rendering import CHART, config, helm, named, of_kind, render

TEXT = README.read_text()


def _commands() -> list[str]:
    block = re.search(r"```sh\n(git clone.*?)```", TEXT, re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line and not line.startswith("#")]


def test_from_a_clone_to_values_for_two_gpu_pools(tmp_path: Path) -> None:
    """The commands as they stand, in a shell; the clone is of a repository with the chart."""
    commands = _commands()
    assert commands[0].startswith("git clone")
    assert len(commands) < 10
    origin = tmp_path / "origin"
    shutil.copytree(CHART, origin / "helm" / "tandem")
    git = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-q", "--no-gpg-sign", "-m", "chart"]):
        subprocess.run([*git, *args], check=True)
    environ = {
        "PATH": f"{Path(helm()).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TANDEM": str(origin),
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = (tmp_path / "tandem" / "rendered.yaml").read_text()
    assert "registry.example.com" not in rendered
    objects = [o for o in yaml.safe_load_all(rendered) if o]
    pools = [d for d in of_kind(objects, "Deployment") if d["metadata"]["name"] != "tandem-gateway"]
    selectors = {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]["nodeSelector"] for d in pools
    }
    assert selectors == {
        "tandem-target-large": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
        "tandem-draft-small": {"nvidia.com/gpu.product": "NVIDIA-A10"},
    }
    for pool in pools:
        (container,) = pool["spec"]["template"]["spec"]["containers"]
        assert container["image"].startswith("registry.mine.example/llm/tandem-")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_pods_are_those_that_are_described() -> None:
    objects = render("two-gpu-pools-values")
    described = {name: int(number) for number, name in re.findall(r"(\d+) . `([\w-]+)`", TEXT)}
    found = {d["metadata"]["name"]: d["spec"]["replicas"] for d in of_kind(objects, "Deployment")}
    assert described == found
    settings = config(objects, named(objects, "Deployment", "tandem-gateway"))
    for peer in (*settings["target"], *settings["draft"]):
        assert f"`{peer}`" in TEXT


def test_the_short_form_is_a_part_of_the_long_one() -> None:
    block = re.search(
        r"```yaml\n(targets:\n  pools:\n    large:\n      replicas.*?)```", TEXT, re.DOTALL
    )
    assert block is not None
    whole = yaml.safe_load((CHART / "ci" / "two-gpu-pools-values.yaml").read_text())

    def check(part: object, of: object) -> None:
        if isinstance(part, dict):
            assert isinstance(of, dict)
            for key, value in part.items():
                check(value, of[key])
        else:
            assert part == of

    check(yaml.safe_load(block[1]), whole)


def test_it_says_what_was_not_tried() -> None:
    assert "No live API server was at hand" in TEXT
