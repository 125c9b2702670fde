"""The images of target and draft, installed here by their own steps, answer as pods.

`heavy`: torch alone is hundreds of megabytes to fetch and unpack.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator

import pytest

from common.engine.native.build import NEEDED, processor_flags
from tests.image.contained import Place, why_not_contained

pytestmark = [
    pytest.mark.processes,
    pytest.mark.heavy,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not_contained()), reason=why_not_contained()),
]
PROMPT = "Repeat this sentence three times: the quick brown fox jumps over the lazy dog."
ASK = ["tandem", "generate", PROMPT, "--temperature=0", "--max-tokens=64"]


@pytest.fixture(scope="module")
def gateway(engine_image: Place, gateway_image: Place) -> Iterator[str]:
    """A gateway, a target and a draft, each as its image runs it; the gateway's address."""
    with (
        engine_image.service("target", "--dtype=bfloat16", seconds=300) as target,
        engine_image.service("draft") as draft,
        gateway_image.service("gateway", f"--target={target}", f"--draft={draft}") as address,
    ):
        yield address


def test_the_kernels_are_in_the_image(engine_image: Place) -> None:
    code = (
        "from common.engine.native import build;"
        "build.processor_flags = lambda: build.NEEDED;"  # it may be built where it can't run
        "print(build.library('/nowhere')[0]._name)"
    )
    done = engine_image.run(["python", "-c", code], engine_image.environment("target"))
    assert done.stdout.startswith(str(engine_image.venv)), done.stderr
    path = engine_image.environment("target")["PATH"]
    assert not shutil.which("g++", path=path)
    assert not shutil.which("clang++", path=path)


def test_a_drafted_answer_through_all_three_images(
    gateway: str, gateway_image: Place, show: Callable[[str], None]
) -> None:
    env = gateway_image.environment("gateway")
    done = gateway_image.run([*ASK, "--stats", "--gateway", gateway], env, 120)
    assert done.returncode == 0, done.stderr
    drafts = re.search(r"relayed (\d+), tested (\d+), accepted (\d+)", done.stdout)
    assert drafts, done.stdout
    show(f"images: a drafted answer, draft tokens {drafts[0]}")
    assert int(drafts[3]) > 0
    status = gateway_image.run(["tandem", "status", "--gateway", gateway], env)
    assert "SmolLM2-135M-Instruct" in status.stdout
    if not NEEDED - processor_flags():
        assert "invariant" in status.stdout  # which in bfloat16 only the native step is
