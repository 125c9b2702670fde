"""Joining targets and drafts: order, names, and peers that come and go."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import ConfigurationError, InvalidRequestError, SequenceError, UnavailableError
from common.types import (
    ChainId,
    Commit,
    Draining,
    ModelInfo,
    Progress,
    Refusal,
    Verdict,
)
from gateway import types
from gateway.config import GatewayConfig
from gateway.fit import check_fit
from gateway.relay import merge_commits
from gateway.types import Delta, Finished, PeerState, Started
from tests.gateway.fakes import (
    TARGET_MODEL,
    TOKENIZER,
    FakeDraft,
    World,
    alive,
    ending,
    in_world,
    states,
    until,
    verdicts,
    world,
)


def test_events_come_in_order_and_add_up() -> None:
    async def test(w: World) -> None:
        w.target.script = [
            Verdict(0, 0, 3, 2, (71, 68, 75), num_cached=1),
            Verdict(0, 0, 0, 0, TOKENIZER.encode("l"), num_stale=2),
            replace(ending("o!"), num_tested=1, num_accepted=1),
        ]
        events = await w.stream("ab", temperature=0, seed=7, request_id="mine")
        assert isinstance(events[0], Started)
        assert (events[0].request_id, events[0].seed) == ("mine", 7)
        assert events[0].num_prompt_tokens == 2
        assert all(isinstance(event, Delta) for event in events[1:-1])
        assert w.text(events) == "hello!"
        assert [o.name for o in events[1].origins] == ["ACCEPTED", "ACCEPTED", "RECOVERED"]
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.usage.prompt, finished.usage.cached) == (2, 1)
        assert (finished.usage.delivered, finished.usage.discarded) == (6, 0)
        figures = finished.speculation
        assert (figures.steps, figures.tested, figures.accepted) == (3, 4, 3)
        assert figures.accepted_per_position == (2, 1)
        assert (figures.stale, figures.undrafted_steps) == (2, 1)
        assert w.relay.num_live() == 0
        assert w.target.closes == []  # it ended by itself

    in_world(test)


def test_progress_is_told_while_the_request_waits() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        [opened] = w.target.opens
        w.target.say(Progress(opened.sequence_id, 3, 0))
        await until(lambda: w.relay.num_live() == 1)
        await asyncio.sleep(0.05)
        w.target.say(*verdicts(opened, [ending("x")]))
        events = await task
        assert types.Progress(3, 0) in events

    in_world(test)


def test_a_draft_hears_commits_and_its_guesses_reach_the_target_under_new_names() -> None:
    async def test(w: World) -> None:
        # Requests before this one make ids differ on the two sides.
        w.target.script = [ending("x")]
        await w.stream(speculate=False)
        w.target.script = []
        task = asyncio.create_task(w.stream("the", lookahead=5))
        await until(lambda: w.draft.opens)
        at_target, at_draft = w.target.opens[-1], w.draft.opens[-1]
        assert at_draft.token_ids == at_target.token_ids == TOKENIZER.encode("the")
        assert at_draft.lookahead == at_target.lookahead == 5
        assert at_draft.sequence_id != at_target.sequence_id
        w.draft.propose(at_draft.sequence_id, serial=4, start=1, text="abc")
        w.draft.propose(10**6, serial=4, start=1, text="abc")  # nobody's: ignored
        await until(lambda: w.target.proposals)
        [proposal] = w.target.proposals
        assert proposal.sequence_id == at_target.sequence_id
        assert proposal.chain_id == ChainId(at_draft.sequence_id, 4)
        w.target.say(*verdicts(at_target, ["ab"]))
        await until(lambda: w.draft.commits)
        assert w.draft.commits == [Commit(at_draft.sequence_id, 1, TOKENIZER.encode("ab"), 5)]
        w.target.say(*verdicts(at_target, [ending("c")], committed_len=3))
        events = await task
        assert events[-1].speculation.drafted == 3
        await until(lambda: w.draft.closes == [at_draft.sequence_id])
        assert w.target.closes == []

    in_world(test, drafted=True)


def test_a_lost_draft_costs_nothing_and_is_given_live_sequences_when_it_is_back() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream("ab"))
        await until(lambda: w.draft.opens)
        opened = w.target.opens[0]
        w.target.say(*verdicts(opened, ["cd"]))
        await until(lambda: w.draft.commits)
        await w.draft.stop()
        await until(lambda: states(w.relay) == ["READY", "CONNECTING"], "the loss")
        w.target.say(*verdicts(opened, ["ef"], committed_len=4))
        await w.draft.start()
        await until(lambda: len(w.draft.opens) == 2, "the re-open")
        first, second = w.draft.opens
        assert second.token_ids == TOKENIZER.encode("abcdef")
        assert second.num_prompt == 2
        assert second.sequence_id > first.sequence_id
        assert second.resumed
        w.draft.propose(second.sequence_id, serial=1, start=6, text="gh")
        await until(lambda: w.target.proposals)
        assert w.target.proposals[0].chain_id == ChainId(second.sequence_id, 1)
        w.target.say(*verdicts(opened, [ending("gh")], committed_len=6))
        assert w.text(await task) == "cdefgh"

    in_world(test, drafted=True)


def test_requests_go_on_without_a_draft() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("hello")]
        events = await w.stream()
        assert events[0].max_lookahead == GatewayConfig.lookahead  # a draft may come
        assert w.text(events) == "hello"
        assert w.relay.status()[1].state is PeerState.CONNECTING

    in_world(test, draft_address="127.0.0.1:1")  # nobody listens there


def test_what_cannot_be_encoded_costs_the_stream_and_no_more() -> None:
    async def test(w: World) -> None:
        (target,) = w.relay._fleet.targets
        stream = target.stream
        target.send(object())
        await until(lambda: target.stream != stream and target.ready)
        w.target.script = [ending("x")]
        assert w.text(await w.stream()) == "x"

    in_world(test)


def test_a_refusing_draft_is_left_alone() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.draft.opens and w.target.opens)
        [at_draft], [at_target] = w.draft.opens, w.target.opens
        w.draft.say(Refusal(at_draft.sequence_id, SequenceError(8, "NO_CAPACITY", "full")))
        await until(lambda: w.relay.status()[1].num_sequences == 0)
        w.target.say(*verdicts(at_target, ["a", ending("b")]))
        assert w.text(await task) == "ab"
        assert w.draft.commits == []
        assert w.draft.closes == []

    in_world(test, drafted=True)


@pytest.mark.parametrize(
    "model",
    [
        ModelInfo("m", vocab_size=260, tokenizer_fingerprint="other", noise_version="n1"),
        ModelInfo("m", vocab_size=260, tokenizer_fingerprint="", noise_version="n1"),
        replace(TARGET_MODEL, noise_version="n2"),
    ],
)
def test_a_draft_that_does_not_fit_is_not_used(model: ModelInfo) -> None:
    async def test(w: World) -> None:
        peer = w.relay.status()[1]
        assert peer.state is PeerState.MISMATCHED
        assert "drafts" in peer.detail
        w.target.script = [ending("hello")]
        assert w.text(await w.stream()) == "hello"
        assert w.draft.opens == []

    in_world(test, drafted=True, draft=FakeDraft(model))


def test_a_draft_of_the_same_family_fits() -> None:
    async def test(w: World) -> None:
        assert states(w.relay) == ["READY", "READY"]

    in_world(test, drafted=True, draft=FakeDraft(replace(TARGET_MODEL, vocab_size=300)))


def test_a_lost_target_ends_its_requests_and_is_found_again() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he"]
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens and w.draft.opens)
        await w.target.stop()
        with pytest.raises(UnavailableError, match="was lost") as caught:
            await task
        assert caught.value.retry_after_seconds == 1.0
        await until(lambda: w.draft.closes, "the draft's close")
        with pytest.raises(UnavailableError) as caught:
            await w.stream()
        assert caught.value.retry_after_seconds == 1.0
        assert await w.client.models() == ()
        await w.target.start()
        await until(lambda: states(w.relay)[0] == "READY", "the return")
        w.target.script = [ending("hello")]
        assert w.text(await w.stream()) == "hello"

    in_world(test, drafted=True, failover_seconds=0.1)


def test_another_model_at_the_target_makes_the_draft_be_checked_again() -> None:
    async def test(w: World) -> None:
        assert states(w.relay) == ["READY", "READY"]
        await w.target.stop()
        w.target.model = replace(TARGET_MODEL, name="other", noise_version="n2")
        await w.target.start()
        await until(lambda: states(w.relay) == ["READY", "MISMATCHED"], "the mismatch")
        assert [m.name for m in await w.client.models()] == ["other"]

    in_world(test, drafted=True, draft=FakeDraft(TARGET_MODEL))


def test_a_draft_that_knows_too_few_ids_does_not_fit() -> None:
    small = replace(TARGET_MODEL, vocab_size=TARGET_MODEL.vocab_size - 1)
    check_fit(small, TARGET_MODEL, num_ids=small.vocab_size)  # the target's logits are padded
    with pytest.raises(ConfigurationError, match="knows"):
        check_fit(small, TARGET_MODEL, num_ids=TARGET_MODEL.vocab_size)


def test_a_tokenizer_that_is_not_the_models_is_a_mismatch() -> None:
    async def main() -> None:
        async with world() as w:
            await w.target.stop()
            w.target.model = replace(TARGET_MODEL, tokenizer_fingerprint="else")
            await w.target.start()
            await until(lambda: states(w.relay) == ["MISMATCHED"])

    asyncio.run(main())


def test_a_silent_engine_is_lost_even_if_its_service_echoes() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        for _ in range(8):  # longer than it may be silent
            w.target.say(alive())
            await asyncio.sleep(0.05)
        assert not task.done()
        with pytest.raises(UnavailableError, match="its engine has said nothing"):
            await task

    in_world(test, silence_seconds=0.3)


def test_a_service_that_does_not_echo_is_lost_even_if_nothing_is_open() -> None:
    async def test(w: World) -> None:
        w.target.echoes = False
        await until(lambda: states(w.relay) == ["CONNECTING"])
        assert "no heartbeat came back" in w.relay.status()[0].detail
        w.target.echoes = True
        await until(lambda: states(w.relay) == ["READY"])

    in_world(test, silence_seconds=0.2)


def test_a_draining_target_takes_nothing_new_and_finishes_what_it_has() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        w.target.say(Draining(5.0))
        await until(lambda: states(w.relay) == ["DRAINING"])
        with pytest.raises(UnavailableError, match="stops within"):
            await w.stream()
        w.target.say(*verdicts(w.target.opens[0], [ending("x")]))
        assert w.text(await task) == "x"

    in_world(test)


def test_a_draining_gateway_takes_nothing_new_and_finishes_what_it_has() -> None:
    async def test(w: World) -> None:
        first, second = (asyncio.create_task(w.stream()) for _ in range(2))
        await until(lambda: len(w.target.opens) == 2)
        w.relay.drain()
        with pytest.raises(UnavailableError, match="stops"):
            await w.stream()
        w.target.say(*verdicts(w.target.opens[0], [ending("x")]))
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        await w.relay.stop()
        results = await asyncio.gather(first, second, return_exceptions=True)
        [error] = [result for result in results if not isinstance(result, list)]
        assert isinstance(error, UnavailableError)

    in_world(test)


def test_an_error_of_the_target_reaches_the_client_whole() -> None:
    async def test(w: World) -> None:
        error = SequenceError(3, "INVALID_REQUEST", "is bad", "sampling.top_k", 2.0)
        w.target.script = ["he", Verdict(0, 0, 0, 0, (), error=error)]
        with pytest.raises(InvalidRequestError, match="is bad") as caught:
            await w.stream()
        assert caught.value.field == "sampling.top_k"
        assert caught.value.retry_after_seconds == 2.0
        assert w.target.closes == []

    in_world(test)


def test_a_verdict_out_of_order_ends_the_request_only() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        w.target.say(*verdicts(w.target.opens[0], ["x"], committed_len=17))
        with pytest.raises(Exception, match="begins at 17, not at 2"):
            await task
        await until(lambda: w.target.closes)
        w.target.script = [ending("fine")]
        assert w.text(await w.stream()) == "fine"

    in_world(test)


def test_pending_commits_of_a_sequence_merge() -> None:
    other = Commit(2, 5, (9,), 8)
    items = [Commit(1, 3, (4, 5), 8), other, Commit(1, 5, (6,), 7), "else"]
    assert merge_commits(items) == [Commit(1, 3, (4, 5, 6), 7), other, "else"]


def test_many_requests_share_the_streams() -> None:
    async def test(w: World) -> None:
        w.target.script = ["a", "b", ending("c")]
        results = await asyncio.gather(*(w.stream() for _ in range(50)))
        assert {w.text(events) for events in results} == {"abc"}
        assert w.target.num_streams == w.draft.num_streams == 1
        await until(lambda: w.relay.status()[1].num_sequences == 0)
        await until(lambda: len(w.draft.closes) == 50)

    in_world(test, drafted=True)
