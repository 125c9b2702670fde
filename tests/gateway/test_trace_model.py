"""From spans to a request: every figure, whatever arrives and in whatever order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.types import TokenOrigin
from gateway.tracing.model import Outcome, busiest
from gateway.tracing.reading import read
from gateway.tracing.words import Words
from tests.gateway.fakes import TOKENIZER
from tests.gateway.traces import Step, TraceMaker, drafted, simple

A, R, B = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS


def test_a_finished_request() -> None:
    r = read("t", simple(drafted(3)).read())
    assert r.complete
    assert (r.outcome, r.detail, r.name) == (Outcome.FINISHED, "length", "Generate")
    assert (r.request_id, r.model, r.rule, r.lookahead) == ("req-1", "tiny", "coupled", 8)
    assert r.seconds == pytest.approx(0.106)
    assert r.first_token == pytest.approx(0.060)
    f = r.figures
    assert (f.tokens, f.delivered, f.discarded, f.prompt, f.cached) == (6, 6, 0, 10, 4)
    assert (f.steps, f.undrafted_steps, f.drafted, f.stale) == (3, 1, 6, 1)
    assert (f.tested, f.accepted, f.rejected) == (5, 3, 2)
    assert f.acceptance == pytest.approx(0.6)
    assert dict(r.parts) == pytest.approx(
        {"queue": 0.002, "prefill": 0.038, "steps": 0.06, "wire": 0.002, "gateway": 0.003}
    )
    assert r.unexplained == pytest.approx(0.001)
    assert r.per_position == ((2, 2), (2, 1), (1, 0))
    assert r.notes == ()


def test_rounds_name_their_tokens_and_what_they_consumed() -> None:
    r = read("t", simple(drafted(3)).read())
    assert [[t.origin for t in x.tokens] for x in r.rounds] == [[B], [A, A, B], [A, R]]
    assert [t.position for t in r.tokens] == [10, 11, 12, 13, 14, 15]
    assert [t.round_index for t in r.tokens] == [0, 1, 1, 1, 2, 2]
    assert [x.rejected for x in r.rounds] == [(), (), (70, 71)]
    assert [x.chains for x in r.rounds] == [(), (0,), (1,)]
    assert [(c.cause, c.consumed_by, c.start) for c in r.chains] == [(0, (1,), 11), (1, (2,), 14)]
    assert r.rounds[1].bar.begin == pytest.approx(0.063)
    assert r.rounds[1].bar.seconds == pytest.approx(0.019)
    assert (r.rounds[1].step_id, r.rounds[1].num_rows, r.rounds[1].wait_seconds) == (101, 3, 0.004)


def test_a_chain_that_outlives_a_commit_is_consumed_twice() -> None:
    t = simple([Step((), (65,)), Step((66, 67), (66, 67)), Step((68,), (70,))])
    chains = [s for s in t.spans if s[1].name == "draft.propose"]
    last = [s for _, s in t.spans if s.name == "target.verify"][-1]
    t.spans.remove(chains[1])
    whole = chains[0][1]
    for pair in whole.attributes:
        if pair.key == "tandem.token_ids":
            pair.value.array_value.values.add().int_value = 68
    del last.links[:]
    last.links.add(trace_id=whole.trace_id, span_id=whole.span_id)
    r = read("t", t.read())
    assert r.chains[0].consumed_by == (1, 2)
    assert r.rounds[2].rejected == (68,)


def test_spans_may_come_in_any_order() -> None:
    spans = simple(drafted(20)).read()
    expected = read("t", spans)
    for seed in range(5):
        random.Random(seed).shuffle(spans)
        assert read("t", spans) == expected


@pytest.mark.parametrize(
    ("event", "error", "outcome"),
    [
        ("tandem.cancelled", "the client has cancelled", Outcome.CANCELLED),
        ("tandem.deadline", "too late", Outcome.DEADLINE),
        ("tandem.first_token", "the target was lost", Outcome.FAILED),
    ],
)
def test_requests_that_did_not_finish(event: str, error: str, outcome: Outcome) -> None:
    r = read("t", simple(drafted(2), events=[(event, 70.0)], error=error, finish="").read())
    assert (r.outcome, r.detail) == (outcome, error)
    assert r.figures.tokens == 4


def test_a_draft_that_returned_is_a_second_attempt() -> None:
    t = simple(drafted(3))
    root = t.spans[0][1].span_id
    known = {"tandem.sequence.id": 9, "tandem.wire_seconds": 0.0}
    known |= {"tandem.peer.address": "127.0.0.1:7072"}  # type: ignore[dict-item]
    again = t.add(
        "gateway",
        "draft.session",
        80,
        100,
        known | {"tandem.session.reason": "draft_returned"},
        parent=root,
    )
    t.add(
        "draft",
        "draft.sequence",
        81,
        99,
        {"tandem.sequence.id": 9, "tandem.num_rounds_summed": 0},
        parent=again,
    )
    first = next(s for _, s in t.spans if s.name == "draft.session")
    first.events.add(name="tandem.draft_lost", time_unix_nano=first.end_time_unix_nano)
    r = read("t", t.read())
    assert [(d.index, d.reason, d.lost) for d in r.drafts] == [
        (0, "first", True),
        (1, "draft_returned", False),
    ]
    assert r.notes == ("a draft was lost on the way",)
    assert r.complete


def test_a_draft_that_tells_nothing_is_missed_and_its_tokens_are_unknown() -> None:
    t = simple(drafted(3))
    r = read("t", t.read("gateway", "target"))
    assert r.missing == ("1 draft.sequence",)
    assert not r.complete
    assert r.figures.accepted == 3
    assert r.rounds[2].rejected == (None, None)
    assert r.notes == ("2 links to proposals that are not here",)


def test_what_is_there_before_the_root_is_shown() -> None:
    t = simple(drafted(3))
    r = read("t", t.read("target", "draft"))
    assert r.outcome is Outcome.RUNNING
    assert "the gateway's root span" in r.missing
    assert (r.figures.tokens, r.figures.tested, r.figures.accepted) == (6, 5, 3)
    verdicts = [s for s in t.read("target") if s.name == "target.verify"]
    r = read("t", verdicts)  # the sequence is open still
    assert (len(r.rounds), r.figures.tested, r.figures.accepted) == (3, 5, 3)
    assert read("t", []).complete is False


def test_rounds_that_have_not_arrived_are_counted() -> None:
    spans = simple(drafted(9)).read()
    verdicts = [s for s in spans if s.name == "target.verify"]
    r = read("t", [s for s in spans if s not in verdicts[3:5]])
    assert r.missing == ("2 rounds of 9",)


def test_rounds_beyond_512_are_in_the_sums() -> None:
    r = read("t", simple(drafted(512), summed=100).read())
    assert r.complete
    assert len(r.rounds) == 512
    assert r.figures.summed == 100
    assert r.figures.steps == 612
    assert r.figures.tokens == sum(len(s.token_ids) for s in drafted(512)) + 100
    assert r.figures.tokens == len(r.tokens) + 100


@pytest.mark.parametrize("skew_ms", [-250.0, 10_000.0])
def test_a_clock_that_is_off_is_put_right(skew_ms: float) -> None:
    r = read("t", simple(drafted(3), skew_ms=skew_ms).read())
    assert r.rounds[0].bar.begin == pytest.approx(0.043, abs=0.001)
    assert r.targets[0].shifted_seconds == pytest.approx(-skew_ms / 1e3, abs=0.001)
    side = "behind" if skew_ms < 0 else "ahead"
    assert r.notes == (f"the target's clock is {abs(skew_ms):.1f} ms {side}; its lane is moved",)


def test_a_failover_is_a_second_target() -> None:
    t = simple(drafted(2))
    again = TraceMaker(1)
    again.spans = list(t.spans)
    root = t.spans[0][1].span_id
    held = again.add(
        "gateway",
        "target.session",
        85,
        99,
        {
            "tandem.peer.address": "127.0.0.1:8",
            "tandem.sequence.id": 5,
            "tandem.session.reason": "target_lost",
            "tandem.wire_seconds": 0.0,
        },
        parent=root,
    )
    r = read("t", again.read())
    assert [x.reason for x in r.targets] == ["first", "target_lost"]
    assert r.missing == ("1 target.sequence",)
    assert held


def test_the_busiest_window() -> None:
    rounds = read("t", simple([Step((), (65,))] * 20 + drafted(6) + [Step((), (65,))] * 20).read())
    window = busiest(rounds.rounds, 6)
    assert (window.start, window.stop) == (20, 26)
    assert busiest(rounds.rounds[:3], 6) == slice(0, 3)
    assert busiest([replace(rounds.rounds[0])] * 9, 4) == slice(0, 4)


def test_words_of_rounds() -> None:
    ids = TOKENIZER.encode("the catés")
    r = read(
        "t", simple([Step(ids[:2], ids[:3]), Step((ids[4],), ids[3:]), Step((), (259,))]).read()
    )
    texts = Words(TOKENIZER).of(r)
    assert texts[0].tokens == ("the", " ", "c")
    assert texts[1].rejected == ("t",)
    assert texts[1].tokens == ("a", "t", "\ufffd", "é", "s")
    assert texts[2].tokens == ("</s>",)
    assert Words().of(r)[1].rejected == (f"#{ids[4]}",)
