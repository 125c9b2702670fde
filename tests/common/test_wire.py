"""Whatever the rooms say to each other arrives as it was said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem.v1 import draft_pb2, target_pb2
from tandem.v1 import types_pb2 as pb

from common import wire
from common.errors import InvalidRequestError, SequenceError
from common.types import (
    MAX_LOGPROBS,
    ChainId,
    CloseSequence,
    Commit,
    Draining,
    EngineStatus,
    FinishReason,
    Heartbeat,
    ModelInfo,
    OpenSequence,
    Progress,
    Proposal,
    Refusal,
    Rule,
    SamplingParams,
    SparseDist,
    StaleCounts,
    TokenOrigin,
    TopLogprobs,
    Verdict,
    VerdictTiming,
)

T = TypeVar("T")
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(U32, max_size=5).map(tuple)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SECONDS = st.integers(0, 10**13).map(lambda nanos: nanos / 1e9)
FLOATS = st.floats(-1e6, 1e6)
F32 = st.floats(-100, 0, width=32)
BIASES = st.floats(-100, 100)
TOP = st.lists(st.tuples(U32, F32), max_size=3).map(
    lambda pairs: TopLogprobs(tuple(i for i, _ in pairs), tuple(p for _, p in pairs))
)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    rule = draw(st.sampled_from([Rule.REJECTION, Rule.COUPLED]))
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return SamplingParams(
        temperature=draw(st.floats(0, 1e5)),
        top_k=draw(U32),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1, exclude_max=True)),
        repetition_penalty=draw(st.floats(0, 10, exclude_min=True)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=tuple(sorted(draw(st.dictionaries(U32, BIASES, max_size=3)).items())),
        min_tokens=draw(st.integers(0, max_tokens)),
        max_tokens=max_tokens,
        stop_token_ids=draw(IDS),
        ignore_eos=draw(st.booleans()),
        num_logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        seed=draw(U64),
        rule=rule,
    )


OPENS = st.builds(
    OpenSequence,
    sequence_id=U64,
    token_ids=IDS,
    num_prompt=U32,
    sampling=samplings(),
    lookahead=U32,
    priority=I32,
    resumed=st.booleans(),
    timeout_seconds=st.none() | SECONDS,
    cache_scope=WORDS,
    traceparent=WORDS,
    fork_of=U64,
)
DISTRIBUTIONS = st.lists(st.tuples(U32, FLOATS), max_size=3).map(
    lambda pairs: SparseDist(
        np.array([i for i, _ in pairs], np.int64), np.array([p for _, p in pairs], np.float64)
    )
)
PROPOSALS = st.builds(
    Proposal,
    sequence_id=U64,
    chain_id=st.builds(ChainId, U64, U64),
    base_len=U32,
    start=U32,
    token_ids=IDS,
    distributions=st.lists(DISTRIBUTIONS, max_size=3).map(tuple),
    traceparent=WORDS,
    held_seconds=SECONDS,
)
ERRORS = st.builds(SequenceError, I32, WORDS, WORDS, WORDS, st.none() | SECONDS)
VERDICTS = st.builds(
    Verdict,
    sequence_id=U64,
    committed_len=U32,
    num_tested=U32,
    num_accepted=U32,
    token_ids=IDS,
    logprobs=st.lists(F32, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | ERRORS,
    lookahead=U32,
    step_id=U64,
    timing=st.builds(VerdictTiming, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    num_stale=U32,
    num_cached=U32,
    stale=st.builds(StaleCounts, U32, U32, U32, U32, U32),
    batch_size=U32,
    num_preemptions=U32,
    traceparent=WORDS,
    top_logprobs=st.lists(TOP, max_size=3).map(tuple),
)
COMMITS = st.builds(Commit, U64, U32, IDS, U32, WORDS)
CLOSES = st.builds(CloseSequence, U64)
HEARTBEATS = st.builds(Heartbeat, U64, st.booleans())
PROGRESS = st.builds(Progress, U64, U32, U32)
REFUSALS = st.builds(Refusal, U64, ERRORS)
STATUSES = st.builds(EngineStatus, U32, U32, U32, U32, U64, U64, U32)
DRAININGS = st.builds(Draining, SECONDS)
MODELS = st.builds(
    ModelInfo, WORDS, U32, WORDS, WORDS, WORDS, st.booleans(), IDS, U32, U32, WORDS,
    st.lists(WORDS, max_size=3).map(tuple), WORDS,
)  # fmt: skip


def plain(item: Any) -> Any:
    """Arrays as tuples, so that proposals can be compared."""
    if isinstance(item, Proposal):
        dists = tuple((tuple(d.token_ids), tuple(d.probs)) for d in item.distributions)
        return replace(item, distributions=cast(Any, dists))
    return item


def kinds(items: list[Any], *order: type) -> list[Any]:
    """The items as a message holds them: kind by kind, each kind in its order."""
    return [plain(item) for kind in order for item in items if type(item) is kind]


def lists(*items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(*items), max_size=6)


@given(lists(OPENS, PROPOSALS, CLOSES, HEARTBEATS))
def test_what_a_target_is_told(items: list[Any]) -> None:
    sent = wire.verify_request(items).SerializeToString()
    message = target_pb2.VerifyRequest.FromString(sent)
    assert [wire.open_from_pb(m) for m in message.opens] == kinds(items, OpenSequence)
    assert list(map(plain, wire.target_events(message))) == kinds(items, Proposal, CloseSequence)
    assert [wire.heartbeat_from_pb(m) for m in message.heartbeats] == kinds(items, Heartbeat)


@given(lists(OPENS, COMMITS, CLOSES, HEARTBEATS))
def test_what_a_draft_is_told(items: list[Any]) -> None:
    sent = wire.propose_request(items).SerializeToString()
    message = draft_pb2.ProposeRequest.FromString(sent)
    assert [wire.open_from_pb(m) for m in message.opens] == kinds(items, OpenSequence)
    assert list(wire.draft_events(message)) == kinds(items, Commit, CloseSequence)


@given(lists(VERDICTS, PROGRESS, HEARTBEATS), st.none() | STATUSES, st.none() | DRAININGS)
def test_what_a_target_says(items: list[Any], status: Any, draining: Any) -> None:
    singular = [item for item in (status, draining) if item is not None]
    sent = wire.verify_response(items + singular).SerializeToString()
    message = target_pb2.VerifyResponse.FromString(sent)
    assert list(wire.target_replies(message)) == [
        *kinds(items, Heartbeat, Progress, Verdict),
        *singular,
    ]


@given(lists(PROPOSALS, REFUSALS, HEARTBEATS), st.none() | STATUSES, st.none() | DRAININGS)
def test_what_a_draft_says(items: list[Any], status: Any, draining: Any) -> None:
    singular = [item for item in (status, draining) if item is not None]
    sent = wire.propose_response(items + singular).SerializeToString()
    message = draft_pb2.ProposeResponse.FromString(sent)
    assert list(map(plain, wire.draft_replies(message))) == [
        *kinds(items, Heartbeat, Refusal, Proposal),
        *singular,
    ]


@given(MODELS)
def test_models(model: ModelInfo) -> None:
    assert wire.model_from_pb(wire.model_to_pb(model)) == model


def test_enums_have_their_counterparts() -> None:
    for rule in Rule:
        assert wire.rule_from_pb(wire.rule_to_pb(rule), Rule.COUPLED) is rule
    assert wire.rule_from_pb(0, Rule.GREEDY) is Rule.GREEDY
    for reason in (None, *FinishReason):
        assert wire.finish_reason_from_pb(wire.finish_reason_to_pb(reason)) is reason
    origins = tuple(TokenOrigin)
    assert wire.origins_from_pb(wire.origins_to_pb(origins)) == origins
    for ours, theirs in ((Rule, pb.Rule), (FinishReason, pb.FinishReason)):
        assert len(ours) == len(theirs.values()) - 1


def test_unset_sampling_means_the_defaults() -> None:
    taken = wire.sampling_from_pb(pb.SamplingParams(), max_tokens=256)
    assert taken == SamplingParams()


def test_sampling_out_of_range_is_refused_with_its_field() -> None:
    message = pb.OpenSequence(sampling=pb.SamplingParams(top_p=2, max_tokens=1))
    with pytest.raises(InvalidRequestError) as caught:
        wire.open_from_pb(message)
    assert caught.value.field == "sampling.top_p"
