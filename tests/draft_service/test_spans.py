"""What the draft's spans tell of chains, from an n-gram engine's own steps."""

from __future__ import annotations

import pytest

from common.types import Commit, OpenSequence, SamplingParams, StepResult
from draft_service import spans
from draft_service.drafters.ngram import NgramDrafter
from draft_service.engine import DraftEngine
from draft_service.spans import DraftSpans
from tests.tracing import CALLER, Recorder, attributes

VERIFY = "00-0000000000000000000000000000abcd-{:016x}-01"


class House:
    """An engine and its spans."""

    def __init__(self) -> None:
        self.recorder = Recorder("draft")
        self.watching = DraftSpans(self.recorder.tracing)
        self.engine = DraftEngine(NgramDrafter(1, 2))
        prompt = (5, 6, 7, 5)
        opened = OpenSequence(
            1, prompt, 4, SamplingParams(), lookahead=2, traceparent=CALLER, arrived_at=100.0
        )
        self.watching.opened(opened)
        self.engine.submit(opened)

    def step(self) -> StepResult:
        result = self.engine.step()
        return self.watching.stepped(result) or result

    def commit(self, committed_len: int, *token_ids: int, at: float = 0.0) -> StepResult:
        commit = Commit(1, committed_len, token_ids, 2, VERIFY.format(committed_len), at)
        self.engine.submit(commit)
        return self.step()


def test_chains() -> None:
    house = House()
    (one,) = house.step().proposals
    (same,) = house.commit(4, 6).proposals  # agrees: the chain goes on
    assert one.traceparent == same.traceparent != ""
    (two,) = house.commit(5, 6, at=200.0).proposals  # disagrees: a new one
    assert two.traceparent not in ("", one.traceparent)
    house.watching.closed(1)
    (prefill,) = house.recorder.named("draft.prefill")
    first, second = house.recorder.named("draft.propose")
    (sequence,) = house.recorder.named("draft.sequence")
    assert attributes(prefill) == {"num_tokens": 4}
    assert attributes(first)["token_ids"] == [6, 7, 5]
    assert attributes(first)["chain.base_len"] == attributes(first)["proposal.start"] == 4
    assert attributes(second)["chain.base_len"] == 6
    assert attributes(second)["chain.serial"] == 1
    assert len(first.links) == 0
    assert [link.context.span_id for link in second.links] == [5]
    assert second.context is not None
    assert f"{second.context.span_id:016x}" in two.traceparent
    found = attributes(sequence)
    assert found["num_drafted"] == 3 + len(two.token_ids)
    assert found["num_rounds_summed"] == 0
    assert house.recorder.spans[0] is sequence


def test_chains_beyond_the_limit_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_ROUNDS", 1)
    house = House()
    house.step()
    (beyond,) = house.commit(4, 5).proposals
    assert beyond.traceparent == ""
    house.watching.closed(1)
    assert len(house.recorder.named("draft.propose")) == 1
    (sequence,) = house.recorder.named("draft.sequence")
    assert attributes(sequence)["num_rounds_summed"] == 1


def test_the_engine_says_when_a_prompt_is_read() -> None:
    house = House()
    result = house.engine.step()
    (prefill,) = result.prefills
    assert (prefill.sequence_id, prefill.num_tokens) == (1, 4)
    assert result.info is not None
    assert result.info.began <= prefill.began <= prefill.ended
    assert result.causes[1].arrived_at == 100.0
    assert house.engine.step().prefills == ()
