"""What the target exposes equals what its verdicts say, and stale tokens have one cause each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.block_manager import BlockManager
from common.metrics import Metrics
from common.types import (
    ChainId,
    EngineStatus,
    OpenSequence,
    Proposal,
    SamplingParams,
    StaleCounts,
    StepInfo,
    StepResult,
    TargetEvent,
    Tokens,
    Verdict,
)
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.ngram import NgramDrafter
from target_service.engine import TargetEngine
from target_service.metrics import TargetMetrics
from target_service.scheduler import SchedulerConfig
from target_service.sequence import Sequence
from tests.driver import Driver, HookedModel, Script
from tests.models import paged
from tests.scrape import text_of, value


class Watched:
    """A target engine whose steps an observer hears of, as in its service."""

    def __init__(self, engine: TargetEngine, observer: TargetMetrics) -> None:
        self._engine, self._observer = engine, observer
        self.num_steps = self.num_sought = self.num_found = 0

    def submit(self, event: TargetEvent) -> None:
        if isinstance(event, OpenSequence):
            self._observer.opened(event)
        self._engine.submit(event)

    def step(self) -> StepResult:
        result = self._engine.step()
        self._observer.stepped(result)
        if result.info:
            self.num_steps += 1
            self.num_sought += result.info.num_sought
            self.num_found += result.info.num_found
        for verdict in result.verdicts:
            if verdict.ended:
                self._observer.closed(verdict.sequence_id)
        return result


Read = Callable[..., float]


def _opens(batch: int, traced: bool = False) -> list[OpenSequence]:
    prompt = (5, 6, 7, 8, 5, 6, 7)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01" if traced else ""
    return [
        OpenSequence(
            sid,
            prompt[: 3 + sid],
            3 + sid,
            SamplingParams(temperature=0.5, max_tokens=20, seed=sid, ignore_eos=True),
            lookahead=4,
            traceparent=trace,
        )
        for sid in range(1, batch + 1)
    ]


def _run(
    script: Script, drafter: str, num_blocks: int, traced: bool = False
) -> tuple[Driver, Read, Watched, Metrics]:
    metrics = Metrics("target")
    model = HookedModel(paged("llama"))
    config = SchedulerConfig(max_rows=16)
    engine = TargetEngine(model, BlockManager(num_blocks, 4), config=config)
    watched = Watched(engine, TargetMetrics(metrics.of("tiny")))
    make: Any = partial(NgramDrafter, 1, 3)
    if drafter == "model":
        make = lambda: ModelDrafter(paged("llama", "draft"), BlockManager(128, 16))  # noqa: E731
    driver = Driver(watched, model, make, script)  # type: ignore[arg-type]
    driver.run(_opens(3, traced))
    return driver, partial(value, text_of(metrics)), watched, metrics


SCRIPTS = st.builds(
    Script,
    piece_delays=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    draft_steps=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    commit_delays=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    split=st.booleans(),
    restart_at=st.none() | st.integers(1, 15),
)


@settings(max_examples=25)
@given(SCRIPTS, st.sampled_from(["ngram", "model"]), st.sampled_from([64, 9]))
def test_metrics_are_the_sums_of_the_verdicts(script: Script, drafter: str, blocks: int) -> None:
    driver, scraped, watched, _ = _run(script, drafter, blocks)
    verdicts = [v for of_one in driver.verdicts.values() for v in of_one]
    assert scraped("committed_tokens_total") == sum(len(v.token_ids) for v in verdicts) == 60
    assert scraped("spec_decode_num_draft_tokens_total") == driver.counts["tested"]
    assert scraped("spec_decode_num_accepted_tokens_total") == driver.counts["accepted"]
    assert scraped("spec_decode_num_drafts_total") == sum(v.num_tested > 0 for v in verdicts)
    assert scraped("step_seconds_count") == watched.num_steps
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    for position in range(5):
        kept = sum(v.num_accepted > position for v in verdicts)
        assert scraped(name, position=str(position)) == kept
    causes: Counter[str] = Counter()
    for v in verdicts:
        assert sum(v.stale) == v.num_stale
        assert min(v.stale) >= 0
        causes.update(v.stale._asdict())
    for cause, num in causes.items():
        assert scraped("stale_proposals_total", reason=cause) == num
    assert sum(causes.values()) == driver.counts["stale"]
    assert causes["malformed"] == 0
    assert scraped("num_preemptions_total") == sum(v.num_preemptions for v in verdicts)
    assert scraped("kv_cache_usage_ratio") == 0
    assert scraped("prefix_cache_queries_total") == watched.num_sought
    assert scraped("prefix_cache_hits_total") == watched.num_found
    assert watched.num_sought >= 4 + 5 + 6
    assert watched.num_found >= sum(v.num_cached for v in verdicts)


def test_small_memory_shows_as_preemptions_and_batches_are_told() -> None:
    driver, scraped, _, _ = _run(Script(), "ngram", 9)
    assert scraped("num_preemptions_total") > 0
    sizes = {v.batch_size for of_one in driver.verdicts.values() for v in of_one}
    assert sizes <= {1, 2, 3}
    assert len(sizes) > 1


def test_a_warm_cache_shows_as_hits() -> None:
    metrics, model = Metrics("target"), HookedModel(paged("llama"))
    engine = Watched(TargetEngine(model, BlockManager(64, 4)), TargetMetrics(metrics.of("tiny")))
    for first in (1, 4):
        driver = Driver(engine, model, None, Script())  # type: ignore[arg-type]
        opens = [replace(o, sequence_id=o.sequence_id + first) for o in _opens(3)]
        driver.run(opens)
        found = [driver.verdicts[o.sequence_id][0].num_cached for o in opens]
    assert found == [0, 4, 4]  # of prompts of 4, 5 and 6 tokens
    read = partial(value, text_of(metrics))
    assert read("prefix_cache_queries_total") == 2 * (4 + 5 + 6)
    assert read("prefix_cache_hits_total") == 8


def test_steps_carry_the_trace_of_a_sampled_sequence() -> None:
    *_, metrics = _run(Script(), "ngram", 64, traced=True)
    assert f'trace_id="{"ab" * 16}"' in text_of(metrics, open_metrics=True)
    *_, metrics = _run(Script(), "ngram", 64)
    assert "trace_id" not in text_of(metrics, open_metrics=True)


def test_event_loop_time_is_told_between_steps_and_not_for_idle_ones() -> None:
    metrics = Metrics("target")
    observer = TargetMetrics(metrics.of("tiny"))
    step = StepResult(info=StepInfo(1, 0.0, 0.1, 1, 1), status=EngineStatus(num_running=1))
    for result in (step, step, step, StepResult(), step):
        observer.stepped(result)
    assert value(text_of(metrics), "event_loop_seconds_count") == 2
    assert value(text_of(metrics), "num_requests_running") == 1


def test_far_positions_share_a_series() -> None:
    metrics = Metrics("target")
    observer = TargetMetrics(metrics.of("tiny"))
    observer.stepped(StepResult(verdicts=(Verdict(1, 0, 40, 40, (1,) * 41),)))
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert value(text_of(metrics), name, position="15") == 1
    assert value(text_of(metrics), name, position="16+") == 24


# -- the cause of each stale token -----------------------------------------------------


def _sequence() -> Sequence:
    params = SamplingParams(max_tokens=100)
    return Sequence.of(OpenSequence(1, (1, 2, 3), 3, params, 8), (), 1000, 0.0)


def _piece(start: int, *tokens: int, base: int = 3, serial: int = 0) -> Proposal:
    return Proposal(1, ChainId(1, serial), base, start, tokens)


def _late(seq: Sequence) -> None:
    seq.settle([4, 5])
    seq.offer(_piece(3, 4, 5, 6), 8)


def _late_without_a_row(seq: Sequence) -> None:
    seq.offer(_piece(3, 4, 5), 8)
    seq.settle([4])


def _late_then_diverged(seq: Sequence) -> None:
    seq.settle([4, 5])
    seq.offer(_piece(3, 4, 7, 7), 8)
    seq.offer(_piece(6, 7), 8)


def _behind_a_rejected_one(seq: Sequence) -> None:
    seq.offer(_piece(3, 4, 5, 6), 8)
    seq.num_in_pass = 3
    seq.num_tested += 2
    seq.settle([4, 7])
    seq.offer(_piece(6, 7, 7), 8)


def _replaced(seq: Sequence) -> None:
    seq.offer(_piece(3, 4, 5), 8)
    seq.offer(_piece(3, 6, serial=1), 8)
    seq.offer(_piece(5, 6, 6), 8)


def _replaced_while_it_is_tested(seq: Sequence) -> None:
    seq.offer(_piece(3, 4, 5, 6), 8)
    seq.num_in_pass = 2
    seq.offer(_piece(3, 4, 5, serial=1), 8)  # 6 gives way, 4 and 5 are being tested
    seq.num_tested += 2
    seq.settle([4, 5, 7])  # the newer chain's 4 and 5 need no test any more
    assert seq.chain is not None


def _gap(seq: Sequence) -> None:
    seq.offer(_piece(3, 4), 8)
    seq.offer(_piece(5, 6), 8)
    seq.offer(_piece(6, 7), 8)


def _waiting_at_the_end(seq: Sequence) -> None:
    seq.offer(_piece(3, 4, 5, 6), 8)
    seq.num_in_pass = 1
    seq.num_tested += 1
    seq.settle([4])
    seq.kill_chain("finished")


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (_late, StaleCounts(late=2)),
        (_late_without_a_row, StaleCounts(late=1)),
        (_late_then_diverged, StaleCounts(late=1, diverged=3)),
        (_behind_a_rejected_one, StaleCounts(diverged=3)),
        (_replaced, StaleCounts(superseded=4)),
        (_replaced_while_it_is_tested, StaleCounts(late=2, superseded=1)),
        (_gap, StaleCounts(malformed=3)),
        (_waiting_at_the_end, StaleCounts(finished=2)),
    ],
)
def test_every_stale_token_has_its_cause(story: Any, expected: StaleCounts) -> None:
    seq = _sequence()
    story(seq)
    assert seq.take_stale() == expected
    waiting: Tokens = tuple(d.token for d in seq.chain.drafts) if seq.chain else ()
    assert seq.num_received == seq.num_tested + len(waiting) + sum(expected)
    assert seq.take_stale() == StaleCounts()
