"""What the benchmarks stand on: turns, floors, and the worker protocol of the peers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from tests.benchmarks.harness import bounded, interleave
from tests.benchmarks.prompts import chats, edits, essays, long
from tests.benchmarks.steps import Measured, Point

NOISY_PEER = """
from tests.benchmarks.peers.protocol import serve, take_stdout

out = take_stdout()
print("a library says hello")

def answer(prompts, num_tokens):
    print("and again")
    return [0.5] * len(prompts), [[prompt[-1]] * num_tokens for prompt in prompts]

serve(answer, out)
"""


def test_contenders_take_turns() -> None:
    told: list[str] = []

    def run(name: str) -> float:
        told.append(name)
        return 1.0

    contenders = {name: partial(run, name) for name in "ab"}
    assert interleave(contenders, 3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert "".join(told) == "abbaab"


@pytest.mark.parametrize(("value", "holds"), [(1.25, True), (1.2499, False)])
def test_a_bound_itself_holds(value: float, holds: bool) -> None:
    assert bounded("speed", value, ">=", 1.25, "x").holds is holds


def test_floors_of_a_pass() -> None:
    found = Measured({}, 1e9, 1e12, weight_bytes=100, kv_bytes_per_token=10, attention_flops=7)
    point = Point(sequences=3, rows=2, context=50)
    assert found.read_floor(point) == pytest.approx((100 + 3 * 50 * 10) / 1e9)
    assert found.compute_floor(point) == pytest.approx(6 * (100 + 50 * 7) / 1e12)


def test_a_worker_answers_on_a_clean_line() -> None:
    job = json.dumps({"prompts": [[1, 2], [3]], "num_tokens": 2}) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", NOISY_PEER], input=job, capture_output=True, text=True, check=True
    )
    ready, answer = done.stdout.splitlines()
    assert ready == "ready"
    told = json.loads(answer)
    assert told.pop("seconds") >= 0
    assert told == {"first_seconds": [0.5, 0.5], "token_ids": [[2, 2], [3, 3]]}
    assert sorted(done.stderr.splitlines()) == ["a library says hello", "and again"]


def test_prompts_are_distinct_and_as_long_as_they_say() -> None:
    for prompts in (chats(64), essays(200), long(4, 500), edits()):
        assert len({tuple(p) for p in prompts}) == len(prompts)
    assert {len(p) for p in long(3, 2000)} == {2000}
    assert all(35 <= len(p) <= 65 for p in chats(64))
    assert all(270 <= len(p) <= 380 for p in edits())
