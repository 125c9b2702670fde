"""What the target's spans tell of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InternalFaultError, sequence_error
from common.types import (
    Cause,
    FinishReason,
    OpenSequence,
    SamplingParams,
    StepInfo,
    StepResult,
    Verdict,
    VerdictTiming,
)
from target_service import spans
from target_service.spans import TargetSpans
from tests.tracing import CALLER, UNSAMPLED, Recorder, attributes, events

OPEN = OpenSequence(1, (5, 6, 7), 3, SamplingParams(), traceparent=CALLER, arrived_at=100.0)


def _step(number: int, verdict: Verdict, **fields: object) -> StepResult:
    info = StepInfo(number, 100.0 + number, 0.5, 2, 9)
    return replace(StepResult(info=info, verdicts=(verdict,)), **fields)  # type: ignore[arg-type]


def test_a_sequence() -> None:
    recorder = Recorder("target")
    watching = TargetSpans(recorder.tracing)
    watching.opened(OPEN)
    first = Verdict(1, 3, 0, 0, (8,), timing=VerdictTiming(0.75, 0.75))
    told = watching.stepped(_step(1, first))
    assert told is not None
    assert told.verdicts[0].traceparent
    assert replace(told.verdicts[0], traceparent="") == first
    last = Verdict(
        1, 4, 2, 1, (9, 9), finish_reason=FinishReason.LENGTH, num_stale=3, lookahead=5,
        timing=VerdictTiming(step_seconds=1.0, waited_seconds=0.125),
    )  # fmt: skip
    cause = Cause(101.75, (CALLER,))
    watching.stepped(_step(2, last, causes={1: cause}))
    watching.closed(1)
    (prefill,) = recorder.named("target.prefill")
    one, two = recorder.named("target.verify")
    (sequence,) = recorder.named("target.sequence")
    assert attributes(prefill) == {"num_tokens": 3, "num_cached": 0}
    assert attributes(one)["num_tested"] == 0
    assert "proposal.wait_seconds" not in attributes(one)
    assert len(one.links) == 0
    assert len(two.links) == 1
    assert attributes(two) == {
        "step.id": 2, "step.batch_size": 2, "step.rows": 9, "committed_len": 4, "num_tested": 2,
        "num_accepted": 1, "num_stale": 3, "token_ids": (9, 9), "proposal.wait_seconds": 0.25,
        "told_lookahead": 5, "waited_seconds": 0.125,
    }  # fmt: skip
    found = attributes(sequence)
    assert found["finish_reason"] == "length"
    assert (found["queue_seconds"], found["prefill_seconds"], found["steps_seconds"]) == (
        0.75, 0.75, 1.0,
    )  # fmt: skip
    assert (found["num_steps"], found["num_tested"], found["num_undrafted_steps"]) == (2, 2, 1)
    assert events(sequence) == []


def test_rounds_beyond_the_limit_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_ROUNDS", 3)
    recorder = Recorder("target")
    watching = TargetSpans(recorder.tracing)
    watching.opened(OPEN)
    for i in range(5):
        told = watching.stepped(_step(i + 1, Verdict(1, 3 + i, 0, 0, (8,))))
        assert told is not None
        assert bool(told.verdicts[0].traceparent) is (i < 3)
    watching.closed(1)
    assert len(recorder.named("target.verify")) == 3
    (sequence,) = recorder.named("target.sequence")
    assert attributes(sequence)["num_rounds_summed"] == 2
    assert attributes(sequence)["num_steps"] == 5
    assert events(sequence) == ["closed"]


def test_preemption_and_error() -> None:
    recorder = Recorder("target")
    watching = TargetSpans(recorder.tracing)
    watching.opened(OPEN)
    info = StepInfo(1, 101.0, 0.5, 1, 1, preempted=(1, 2))
    error = sequence_error(InternalFaultError("no numbers"))
    watching.stepped(StepResult(info=info))
    watching.stepped(StepResult(info=info, verdicts=(Verdict(1, 3, 0, 0, (), error=error),)))
    watching.closed(1)
    (sequence,) = recorder.spans
    assert attributes(sequence)["num_preemptions"] == 2
    assert sequence.status.description == "no numbers"
    assert events(sequence) == ["preempted", "preempted"]


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED])
def test_what_is_not_traced_is_left_alone(traceparent: str) -> None:
    recorder = Recorder("target")
    watching = TargetSpans(recorder.tracing)
    watching.opened(replace(OPEN, traceparent=traceparent))
    assert watching.stepped(_step(1, Verdict(1, 3, 0, 0, (8,)))) is None
    watching.closed(1)
    assert recorder.spans == []
