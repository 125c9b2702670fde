"""The gateway's image, installed here by its own steps: small, without torch, and it runs."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import distributions
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gateway.cli.processes import ServiceProcess
from tests.gateway.fakes import VOCAB_SIZE, tokenizer_files
from tests.image.contained import Place, why_not_contained
from tests.image.dockerfile import ROOT, command
from tests.models import CONFIGS

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]
MAX_MEGABYTES = 250
contained = pytest.mark.skipif(bool(why_not_contained()), reason=why_not_contained())


def packages(place: Place) -> Path:
    return next(place.venv.glob("lib/python3.*/site-packages"))


def byte_model(folder: Path) -> Path:
    """An untrained model that has an id for every byte, and a chat template."""
    config = deepcopy(CONFIGS["llama"])
    config.vocab_size = VOCAB_SIZE
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder


def plain(place: Place, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment with no variable set but PATH, in a foreign folder."""
    return subprocess.run(
        [str(place.venv / "bin" / args[0]), *args[1:]],
        env={"PATH": str(place.venv / "bin")},
        cwd=place.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_is_small_and_has_no_torch(gateway_image: Place, show: Callable[[str], None]) -> None:
    names = {x.name.lower() for x in distributions(path=[str(packages(gateway_image))])}
    assert "tandem-serve" in names
    assert not names & {"torch", "transformers", "triton", "pip"}
    assert not [name for name in names if name.startswith("nvidia")]
    files = [x for x in gateway_image.venv.rglob("*") if x.is_file() and not x.is_symlink()]
    megabytes = sum(-(-x.stat().st_size // 4096) * 4096 for x in files) / 1e6
    show(f"gateway image: {megabytes:.0f} MB in {len(names)} packages, at most {MAX_MEGABYTES}")
    assert 50 < megabytes < MAX_MEGABYTES


def test_every_module_and_page_of_ours_is_in_the_package(gateway_image: Place) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = sorted({name.partition(".")[0] for name in listed["packages"]})
    assert "tandem" in rooms
    wanted = set()
    for room in rooms:
        top = ROOT / "protos" if room == "tandem" else ROOT
        files = [
            x
            for x in (top / room).rglob("*")
            if x.suffix in {".py", ".cpp", ".h", ".js", ".css", ".html"}
        ]
        wanted |= {str(x.relative_to(top)) for x in files}
    assert len(wanted) > 100
    installed = packages(gateway_image)
    assert not {x for x in wanted if not (installed / x).is_file()}


@pytest.mark.parametrize(
    "args",
    [
        [*command("gateway"), "--help"],
        ["python", "-m", "draft_service", "--help"],
        ["tandem", "--help"],
    ],
    ids=lambda args: args[0] if args[0] == "tandem" else args[2],
)
def test_it_runs_from_the_package(gateway_image: Place, args: list[str]) -> None:
    done = plain(gateway_image, *args)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_it_is_the_package_that_runs(gateway_image: Place) -> None:
    code = (
        "import gateway, tandem.v1, json, sys;"
        "print(json.dumps([gateway.__file__, tandem.v1.__file__, sys.path]))"
    )
    done = plain(gateway_image, "python", "-c", code)
    room, protos, path = json.loads(done.stdout)
    assert Path(room).is_relative_to(gateway_image.venv)
    assert Path(protos).is_relative_to(gateway_image.venv)
    assert not [x for x in path if x and Path(x).is_relative_to(ROOT)]


@contained
def test_a_pod_can_write_to_its_volumes_only(gateway_image: Place) -> None:
    code = "\n".join(
        [
            "import os, sys, tempfile",
            "assert os.getuid() == 65532 and os.getgid() == 65532 and not os.getgroups()",
            "tempfile.NamedTemporaryFile()",
            "open(os.path.expanduser('~/x'), 'w')",
            "for folder in (sys.prefix, os.path.dirname(sys.prefix), '/', '/etc', '/var/tmp'):",
            "    try:",
            "        open(os.path.join(folder, 'x'), 'w')",
            "    except OSError as error:",
            "        print(error.strerror)",
        ]
    )
    done = gateway_image.run(["python", "-c", code], gateway_image.environment("gateway"))
    assert done.stdout.splitlines() == ["Read-only file system"] * 5, done.stderr
    assert not (gateway_image.work / "cache" / "x").exists()  # nor is anything left of it here


@contained
def test_gateway_and_ngram_draft_answer_as_pods(gateway_image: Place, tmp_path: Path) -> None:
    args = ["--port=0", f"--model={byte_model(tmp_path)}", "--dtype=float32"]
    target = ServiceProcess("target_service", args)
    draft = [*command("gateway")[:2], "draft_service"]
    ask = ["tandem", "generate", "Hi!", "--max-tokens=16", "--stats", "--gateway"]
    env = gateway_image.environment("gateway")
    try:
        peer = target.wait_until_serving(60)
        with (
            gateway_image.service("gateway", command=draft) as helper,
            gateway_image.service("gateway", f"--target={peer}", f"--draft={helper}") as gateway,
        ):
            status = gateway_image.run(["tandem", "status", "--gateway", gateway], env)
            assert helper in status.stdout, status.stderr
            done = gateway_image.run([*ask, gateway], env)
            assert done.returncode == 0, done.stderr
            assert "tokens" in done.stdout, done.stderr  # a chat: its template was rendered there
    finally:
        target.stop()


@contained
def test_without_home_and_variables(gateway_image: Place) -> None:
    env = {"PATH": str(gateway_image.venv / "bin")}
    for args in (["tandem", "--help"], [*command("gateway"), "--help"]):
        done = gateway_image.run(args, env)
        assert done.returncode == 0, done.stderr
