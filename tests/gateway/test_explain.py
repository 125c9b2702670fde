"""What bounded a request: every case has one thing wrong with it, and that one is found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from common.errors import NotFoundError
from common.types import ChainId, Rule, StaleCounts, Verdict
from gateway.cli import app
from gateway.explain import explain
from gateway.records import DraftWatch, Journal, RequestRecord
from gateway.types import GenerationTiming, Severity, SpeculationFigures, Usage
from gateway.wire import explanation_from_pb, explanation_to_pb
from tests.gateway.fakes import TOKENIZER, World, ending, in_world, until, verdicts

# 100 tokens in 40 steps of 20 ms, well drafted: nothing to complain of.
SPENT = SpeculationFigures(
    steps=40,
    drafted=120,
    tested=80,
    accepted=64,
    accepted_per_position=(30, 18, 9, 4, 2, 1),
    stale=40,
    undrafted_steps=4,
)
TIMING = GenerationTiming(
    total_seconds=0.84,
    time_to_first_token_seconds=0.03,
    queue_seconds=0.001,
    prefill_seconds=0.02,
    steps_seconds=0.8,
    wire_seconds=0.005,
    gateway_seconds=0.004,
)
GOOD = RequestRecord(
    request_id="r1",
    model="tiny",
    ending="length",
    rule=Rule.COUPLED,
    usage=Usage(prompt=30, delivered=100),
    speculation=SPENT,
    timing=TIMING,
    stale=StaleCounts(late=5, diverged=30, finished=5),
    mean_batch_size=1.0,
    lookahead=8,
    num_chains=20,
    has_draft=True,
    draft_turnaround_seconds=0.001,
    draft_round_trip_seconds=0.001,
    target_round_trip_seconds=0.001,
)


def _spent(**changes: Any) -> RequestRecord:
    return replace(GOOD, speculation=replace(SPENT, **changes))


def _timed(**changes: Any) -> RequestRecord:
    return replace(GOOD, timing=replace(TIMING, **changes))


def _stale(**counts: int) -> RequestRecord:
    return replace(GOOD, stale=StaleCounts(**counts))


UNDRAFTED = SpeculationFigures(steps=100, undrafted_steps=100)
CASES: list[tuple[str, RequestRecord, str, str]] = [
    ("failed", replace(GOOD, ending="error", error="no room"), "no room", "see the error"),
    ("deadline", replace(GOOD, ending="deadline"), "time was over", "timeout"),
    (
        "no_draft",
        replace(GOOD, lookahead=0, has_draft=False, speculation=UNDRAFTED, num_chains=0),
        "not drafted",
        "--draft",
    ),
    (
        "no_draft",
        replace(GOOD, lookahead=0, speculation=UNDRAFTED, num_chains=0),
        "not drafted",
        "speculation.disabled",
    ),
    (
        "moved",
        replace(
            GOOD,
            num_moves=2,
            away_seconds=0.2,
            timing=replace(TIMING, total_seconds=1.04, gateway_seconds=0.204),
        ),
        "lost, full or stopped 2 times, and another one went on; 200 ms",
        "--failover-seconds",
    ),
    ("draft_away", replace(GOOD, undrafted_seconds=0.42), "50% of the time", "tandem status"),
    (
        "draft_silent",
        replace(_spent(undrafted_steps=30, accepted_per_position=(8, 6, 4)), num_chains=3),
        "30 of 40 steps",
        "--drafter=model",
    ),
    (
        "paused",
        replace(_spent(undrafted_steps=34, accepted_per_position=(3, 2)), num_paused_steps=30),
        "30 of 40 steps",
        "more targets",
    ),
    ("waited", replace(GOOD, waited_seconds=0.25), "250 ms", "faster"),
    ("low_acceptance", _spent(accepted=24, accepted_per_position=(20, 4)), "30%", "--model"),
    ("stale_late", _stale(late=60), "50% of the draft tokens were right", "nearer"),
    ("stale_diverged", _stale(diverged=90), "75%", "lower"),
    ("stale_superseded", _stale(superseded=60), "50%", "restarted"),
    ("stale_malformed", _stale(malformed=1), "made no sense", "version"),
    (
        "lookahead_short",
        replace(_spent(accepted_per_position=(34, 30)), lookahead=2),
        "83% of the runs",
        "higher",
    ),
    (
        "round_trip",
        replace(GOOD, draft_turnaround_seconds=0.06),
        "3.0 steps",
        "--lookahead of the gateway: higher",
    ),
    ("batch_mates", replace(GOOD, mean_batch_size=8.5), "7.5 other requests", "--max-running"),
    ("queue", _timed(queue_seconds=0.4, total_seconds=1.2), "400 ms, 33%", "--num-kv-tokens"),
    ("preempted", replace(GOOD, num_preemptions=2), "2 times", "--num-kv-tokens"),
    ("prefill", _timed(prefill_seconds=0.6, total_seconds=1.4), "30 prompt tokens", "--max-rows"),
    ("wire", _timed(wire_seconds=0.2, total_seconds=1.0), "200 ms, 20%", "nearer"),
    ("gateway", _timed(gateway_seconds=0.2, total_seconds=1.0), "200 ms, 20%", "--cores"),
    (
        "discarded",
        replace(GOOD, ending="stop_string", usage=Usage(prompt=30, delivered=80, discarded=20)),
        "20% of the tokens",
        "stop_token_ids",
    ),
]


def test_a_good_request_has_nothing_to_complain_of() -> None:
    explanation = explain(GOOD)
    assert explanation.findings == ()
    assert explanation.summary == (
        "ended by length: 100 tokens in 40 steps (2.50 a step), 0.840 s, 119.0 tokens/s",
        "time: queue 0%, prefill 2%, steps 95%, wire 1%, gateway 0%; most of it steps",
        "steps: 21 ms and 1.0 requests in the mean",
        "draft tokens: 120 relayed, 80 tested, 64 accepted (80%), 40 stale"
        " (late 5, diverged 30, finished 5)",
        "accepted by place in a run: 83% 50% 25% 11% 6% 3%",
    )


@pytest.mark.parametrize(("kind", "record", "words", "setting"), CASES)
def test_one_thing_wrong_is_found_and_nothing_else(
    kind: str, record: RequestRecord, words: str, setting: str
) -> None:
    [finding] = explain(record).findings
    assert finding.kind == kind
    assert words in finding.what
    assert setting in finding.setting
    assert finding.numbers or kind == "failed"


def test_the_gravest_comes_first() -> None:
    record = replace(GOOD, undrafted_seconds=0.42, num_preemptions=1, mean_batch_size=9)
    severities = [f.severity for f in explain(record).findings]
    assert severities == [Severity.FAULT, Severity.LIMIT, Severity.NOTE]


@pytest.mark.parametrize("ending", ["cancelled", "error", "deadline"])
def test_a_request_without_a_token_can_be_explained(ending: str) -> None:
    empty = RequestRecord(
        "r", "m", ending, Rule.GREEDY, Usage(3), SpeculationFigures(), GenerationTiming()
    )
    assert explain(empty).summary


@pytest.mark.parametrize("record", [GOOD, *(case[1] for case in CASES)])
def test_explanations_travel(record: RequestRecord) -> None:
    explanation = explain(record)
    assert explanation_from_pb(explanation_to_pb(explanation)) == explanation


def test_the_journal_keeps_the_last() -> None:
    journal = Journal(size=3)
    for name in "abcad":
        journal.add(replace(GOOD, request_id=name))
    assert [n for n in "abcd" if journal.get(n)] == ["a", "c", "d"]


def test_a_watch_tells_attachment_and_turnaround() -> None:
    watch = DraftWatch()
    assert watch.turnaround_seconds is None
    watch.attached(1.0)
    watch.proposed(ChainId(1, 0), 3, 1.5)
    watch.rejected(9, 2.0)
    watch.proposed(ChainId(1, 0), 3, 2.1)  # under way when the chain was found wrong
    watch.proposed(ChainId(1, 1), 9, 2.5)
    assert watch.attached_seconds(3.0) == 2.0
    watch.detached(4.0)
    watch.detached(5.0)
    assert watch.attached_seconds(9.0) == 3.0
    watch.attached(10.0)
    assert watch.attached_seconds(11.0) == 4.0
    assert watch.turnaround_seconds == pytest.approx(0.5)
    assert watch.num_chains == 2


def test_the_final_event_and_the_rpc_say_the_same() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he", ending("llo", num_stale=3, stale=StaleCounts(malformed=3))]
        events = await w.stream("ab", explain=True, request_id="r7")
        explanation = events[-1].explanation
        assert [f.kind for f in explanation.findings] == ["stale_malformed", "no_draft"]
        assert await w.client.explain("r7") == explanation
        generation = await w.client.generate("ab", explain=True)
        assert generation.finished.explanation is not None
        assert (await w.stream("ab"))[-1].explanation is None
        with pytest.raises(NotFoundError, match="request_id: no finished request"):
            await w.client.explain("r8")

    in_world(test)


def test_figures_of_verdicts_and_peers_are_in_the_record() -> None:
    async def test(w: World) -> None:

        task = asyncio.create_task(w.stream("ab", request_id="r1", lookahead=4))
        await until(lambda: w.draft.opens)
        opened = w.draft.opens[0]
        w.draft.propose(opened.sequence_id, 0, 2, "xy")
        await until(lambda: w.target.proposals)
        tested = Verdict(
            0, 0, 2, 1, TOKENIZER.encode("xz"), batch_size=3, num_preemptions=2,
            num_stale=1, stale=StaleCounts(late=1),
        )  # fmt: skip
        w.target.say(*verdicts(w.target.opens[0], [tested]))
        await until(lambda: w.draft.commits)
        w.draft.propose(opened.sequence_id, 1, 4, "q")
        await until(lambda: len(w.target.proposals) == 2)
        last = ending("c", batch_size=1, num_stale=2, stale=StaleCounts(1, 1))
        w.target.say(*verdicts(w.target.opens[0], [last], committed_len=4))
        await task
        record = w.relay.journal.get("r1")
        assert record is not None
        assert (record.ending, record.lookahead, record.has_draft) == ("length", 4, True)
        assert (record.mean_batch_size, record.num_preemptions) == (2.0, 2)
        assert record.stale == StaleCounts(late=2, diverged=1)
        assert record.num_chains == 2
        assert record.draft_turnaround_seconds is not None
        assert record.draft_round_trip_seconds is not None
        assert record.undrafted_seconds < 0.1

    in_world(test, drafted=True)


def test_the_command_line_explains() -> None:
    async def test(w: World) -> None:

        async def tandem(*args: str) -> Any:
            command = [args[0], "--gateway", w.address, *args[1:]]
            return await asyncio.to_thread(lambda: CliRunner().invoke(app, command))

        w.target.script = [ending("hello", num_stale=3, stale=StaleCounts(malformed=3))]
        result = await tandem("generate", "hi", "--explain", "--stats")
        assert "fault: 3 draft tokens made no sense to the target" in result.stdout
        assert "to change it: the draft's version" in result.stdout
        [name] = [x.split()[1] for x in result.stdout.splitlines() if x.startswith("request ")][:1]
        again = await tandem("explain", name)
        assert again.exit_code == 0
        assert again.stdout in result.stdout
        missing = await tandem("explain", "r9")
        assert missing.exit_code == 1
        assert "no finished request" in missing.stderr

    in_world(test)
