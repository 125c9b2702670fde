"""Dataclasses inside, protobuf at the edge: the only translation between the two.

Enum names are equal on both sides but for the protobuf prefix. Decoding raises
`InvalidRequestError` where a message can't be what its sender meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration
from tandem.v1 import draft_pb2, target_pb2
from tandem.v1 import types_pb2 as pb

from common.errors import SequenceError
from common.types import (
    ChainId,
    CloseSequence,
    Commit,
    DraftEvent,
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
    TargetEvent,
    TokenOrigin,
    TopLogprobs,
    Verdict,
    VerdictTiming,
)

E = TypeVar("E", bound=Enum)
TargetReply = Verdict | Progress | EngineStatus | Heartbeat | Draining
DraftReply = Proposal | Refusal | EngineStatus | Heartbeat | Draining


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf duration, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """A protobuf duration as seconds."""
    return message.ToNanoseconds() / 1e9


_RULES: Mapping[Rule, pb.Rule.ValueType] = {r: pb.Rule.Value(f"RULE_{r.name}") for r in Rule}
_REASONS: Mapping[FinishReason, pb.FinishReason.ValueType] = {
    r: pb.FinishReason.Value(f"FINISH_REASON_{r.name}") for r in FinishReason
}
_ORIGINS: Mapping[TokenOrigin, pb.TokenOrigin.ValueType] = {
    o: pb.TokenOrigin.Value(f"TOKEN_ORIGIN_{o.name}") for o in TokenOrigin
}


def _inverse(table: Mapping[E, Any]) -> dict[int, E]:
    return {int(value): key for key, value in table.items()}


_RULE_OF, _REASON_OF, _ORIGIN_OF = _inverse(_RULES), _inverse(_REASONS), _inverse(_ORIGINS)


def rule_to_pb(rule: Rule) -> pb.Rule.ValueType:
    """A rule as its number on the wire."""
    return _RULES[rule]


def rule_from_pb(value: int, default: Rule) -> Rule:
    """A rule from the wire; unspecified and unknown ones are the default."""
    return _RULE_OF.get(value, default)


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """A finish reason as its number on the wire; None is unspecified."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _REASONS[reason]


def finish_reason_from_pb(value: int) -> FinishReason | None:
    """A finish reason from the wire; None if unspecified."""
    return _REASON_OF.get(value)


def origins_to_pb(origins: Iterable[TokenOrigin]) -> list[pb.TokenOrigin.ValueType]:
    """Token origins as numbers on the wire."""
    return [_ORIGINS[o] for o in origins]


def origins_from_pb(values: Iterable[int]) -> tuple[TokenOrigin, ...]:
    """Token origins from the wire."""
    return tuple(_ORIGIN_OF[int(v)] for v in values)


def sampling_to_pb(s: SamplingParams) -> pb.SamplingParams:
    """All parameters, every one explicit."""
    return pb.SamplingParams(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        min_tokens=s.min_tokens,
        max_tokens=s.max_tokens,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        num_logprobs=s.num_logprobs,
        seed=s.seed,
        rule=_RULES[s.rule],
    )


def sampling_from_pb(m: pb.SamplingParams, **replaced: Any) -> SamplingParams:
    """Parameters with the defaults of unset fields filled in; `replaced` go before the message."""
    fields: dict[str, Any] = {
        "temperature": m.temperature if m.HasField("temperature") else 1.0,
        "top_k": m.top_k,
        "top_p": m.top_p if m.HasField("top_p") else 1.0,
        "min_p": m.min_p,
        "repetition_penalty": m.repetition_penalty if m.HasField("repetition_penalty") else 1.0,
        "presence_penalty": m.presence_penalty,
        "frequency_penalty": m.frequency_penalty,
        "logit_bias": tuple(sorted(m.logit_bias.items())),
        "min_tokens": m.min_tokens,
        "max_tokens": m.max_tokens,
        "stop_token_ids": tuple(m.stop_token_ids),
        "ignore_eos": m.ignore_eos,
        "num_logprobs": m.num_logprobs if m.HasField("num_logprobs") else None,
        "seed": m.seed,
        "rule": rule_from_pb(m.rule, Rule.COUPLED),
    }
    return SamplingParams(**(fields | replaced))


def _open_to_pb(o: OpenSequence) -> pb.OpenSequence:
    message = pb.OpenSequence(
        sequence_id=o.sequence_id,
        token_ids=o.token_ids,
        num_prompt=o.num_prompt,
        sampling=sampling_to_pb(o.sampling),
        lookahead=o.lookahead,
        priority=o.priority,
        resumed=o.resumed,
        cache_scope=o.cache_scope,
        traceparent=o.traceparent,
        fork_of=o.fork_of,
    )
    if o.timeout_seconds is not None:
        message.timeout.CopyFrom(duration(o.timeout_seconds))
    return message


def open_from_pb(m: pb.OpenSequence) -> OpenSequence:
    """A new sequence; raises `InvalidRequestError` for sampling parameters out of range."""
    return OpenSequence(
        sequence_id=m.sequence_id,
        token_ids=tuple(m.token_ids),
        num_prompt=m.num_prompt,
        sampling=sampling_from_pb(m.sampling),
        lookahead=m.lookahead,
        priority=m.priority,
        resumed=m.resumed,
        timeout_seconds=seconds(m.timeout) if m.HasField("timeout") else None,
        cache_scope=m.cache_scope,
        traceparent=m.traceparent,
        fork_of=m.fork_of,
    )


def _close_to_pb(c: CloseSequence) -> pb.CloseSequence:
    return pb.CloseSequence(sequence_id=c.sequence_id)


def _close_from_pb(m: pb.CloseSequence) -> CloseSequence:
    return CloseSequence(m.sequence_id)


def _proposal_to_pb(p: Proposal) -> pb.Proposal:
    return pb.Proposal(
        sequence_id=p.sequence_id,
        chain_id=pb.ChainId(epoch=p.chain_id.epoch, serial=p.chain_id.serial),
        base_len=p.base_len,
        start=p.start,
        token_ids=p.token_ids,
        distributions=[
            pb.SparseDistribution(token_ids=d.token_ids.tolist(), probs=d.probs.tolist())
            for d in p.distributions
        ],
        traceparent=p.traceparent,
        held=duration(p.held_seconds) if p.held_seconds else None,
    )


def _proposal_from_pb(m: pb.Proposal) -> Proposal:
    return Proposal(
        sequence_id=m.sequence_id,
        chain_id=ChainId(m.chain_id.epoch, m.chain_id.serial),
        base_len=m.base_len,
        start=m.start,
        token_ids=tuple(m.token_ids),
        distributions=tuple(
            SparseDist(np.array(d.token_ids, np.int64), np.array(d.probs, np.float64))
            for d in m.distributions
        ),
        traceparent=m.traceparent,
        held_seconds=seconds(m.held),
    )


def _commit_to_pb(c: Commit) -> pb.Commit:
    return pb.Commit(
        sequence_id=c.sequence_id,
        committed_len=c.committed_len,
        token_ids=c.token_ids,
        lookahead=c.lookahead,
        traceparent=c.traceparent,
    )


def _commit_from_pb(m: pb.Commit) -> Commit:
    return Commit(m.sequence_id, m.committed_len, tuple(m.token_ids), m.lookahead, m.traceparent)


def _error_to_pb(e: SequenceError) -> pb.SequenceError:
    message = pb.SequenceError(code=e.code, reason=e.reason, field=e.field, message=e.message)
    if e.retry_after_seconds is not None:
        message.retry_after.CopyFrom(duration(e.retry_after_seconds))
    return message


def _error_from_pb(m: pb.SequenceError) -> SequenceError:
    retry = seconds(m.retry_after) if m.HasField("retry_after") else None
    return SequenceError(m.code, m.reason, m.message, m.field, retry)


def _verdict_to_pb(v: Verdict) -> pb.Verdict:
    timing = v.timing
    return pb.Verdict(
        sequence_id=v.sequence_id,
        committed_len=v.committed_len,
        num_tested=v.num_tested,
        num_accepted=v.num_accepted,
        token_ids=v.token_ids,
        logprobs=v.logprobs,
        finish_reason=finish_reason_to_pb(v.finish_reason),
        error=_error_to_pb(v.error) if v.error else None,
        lookahead=v.lookahead,
        step_id=v.step_id,
        timing=pb.VerdictTiming(
            queue=duration(timing.queue_seconds) if timing.queue_seconds else None,
            prefill=duration(timing.prefill_seconds) if timing.prefill_seconds else None,
            step=duration(timing.step_seconds),
            held=duration(timing.held_seconds),
            told=duration(timing.told_seconds),
            waited=duration(timing.waited_seconds) if timing.waited_seconds else None,
        ),
        num_stale=v.num_stale,
        num_cached=v.num_cached,
        stale=stale_to_pb(v.stale) if any(v.stale) else None,
        batch_size=v.batch_size,
        num_preemptions=v.num_preemptions,
        traceparent=v.traceparent,
        top_logprobs=map(top_logprobs_to_pb, v.top_logprobs),
    )


def top_logprobs_to_pb(t: TopLogprobs) -> pb.TopLogprobs:
    """The likeliest tokens at one position."""
    return pb.TopLogprobs(token_ids=t.token_ids, logprobs=t.logprobs)


def top_logprobs_from_pb(m: pb.TopLogprobs) -> TopLogprobs:
    """The likeliest tokens at one position."""
    return TopLogprobs(tuple(m.token_ids), tuple(m.logprobs))


def stale_to_pb(s: StaleCounts) -> pb.StaleCounts:
    """Untested draft tokens by cause."""
    return pb.StaleCounts(**s._asdict())


def stale_from_pb(m: pb.StaleCounts) -> StaleCounts:
    """Untested draft tokens by cause."""
    return StaleCounts(m.late, m.diverged, m.superseded, m.malformed, m.finished)


def _verdict_from_pb(m: pb.Verdict) -> Verdict:
    t = m.timing
    return Verdict(
        sequence_id=m.sequence_id,
        committed_len=m.committed_len,
        num_tested=m.num_tested,
        num_accepted=m.num_accepted,
        token_ids=tuple(m.token_ids),
        logprobs=tuple(m.logprobs),
        finish_reason=finish_reason_from_pb(m.finish_reason),
        error=_error_from_pb(m.error) if m.HasField("error") else None,
        lookahead=m.lookahead,
        step_id=m.step_id,
        timing=VerdictTiming(
            queue_seconds=seconds(t.queue),
            prefill_seconds=seconds(t.prefill),
            step_seconds=seconds(t.step),
            held_seconds=seconds(t.held),
            told_seconds=seconds(t.told),
            waited_seconds=seconds(t.waited),
        ),
        num_stale=m.num_stale,
        num_cached=m.num_cached,
        stale=stale_from_pb(m.stale),
        batch_size=m.batch_size,
        num_preemptions=m.num_preemptions,
        traceparent=m.traceparent,
        top_logprobs=tuple(map(top_logprobs_from_pb, m.top_logprobs)),
    )


def _refusal_to_pb(r: Refusal) -> draft_pb2.Refusal:
    return draft_pb2.Refusal(sequence_id=r.sequence_id, error=_error_to_pb(r.error))


def _refusal_from_pb(m: draft_pb2.Refusal) -> Refusal:
    return Refusal(m.sequence_id, _error_from_pb(m.error))


def _progress_to_pb(p: Progress) -> pb.Progress:
    return pb.Progress(
        sequence_id=p.sequence_id, num_ahead=p.num_ahead, num_prefilled=p.num_prefilled
    )


def _progress_from_pb(m: pb.Progress) -> Progress:
    return Progress(m.sequence_id, m.num_ahead, m.num_prefilled)


def status_to_pb(s: EngineStatus) -> pb.EngineStatus:
    """What an engine says of itself."""
    return pb.EngineStatus(
        num_running=s.num_running,
        num_waiting=s.num_waiting,
        num_blocks=s.num_blocks,
        num_free_blocks=s.num_free_blocks,
        num_ignored=s.num_ignored,
        num_preemptions=s.num_preemptions,
        num_cached_blocks=s.num_cached_blocks,
    )


def status_from_pb(m: pb.EngineStatus) -> EngineStatus:
    """What an engine says of itself."""
    return EngineStatus(
        m.num_running,
        m.num_waiting,
        m.num_blocks,
        m.num_free_blocks,
        m.num_ignored,
        m.num_preemptions,
        m.num_cached_blocks,
    )


def _heartbeat_to_pb(h: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(serial=h.serial, echo=h.echo)


def heartbeat_from_pb(m: pb.Heartbeat) -> Heartbeat:
    """A heartbeat or its echo."""
    return Heartbeat(m.serial, m.echo)


def _draining_to_pb(d: Draining) -> pb.Draining:
    return pb.Draining(grace=duration(d.grace_seconds))


def _draining_from_pb(m: pb.Draining) -> Draining:
    return Draining(seconds(m.grace))


def model_to_pb(m: ModelInfo) -> pb.ModelInfo:
    """What a service serves."""
    return pb.ModelInfo(
        name=m.name,
        vocab_size=m.vocab_size,
        tokenizer_fingerprint=m.tokenizer_fingerprint,
        weights_fingerprint=m.weights_fingerprint,
        noise_version=m.noise_version,
        row_invariant=m.row_invariant,
        eos_token_ids=m.eos_token_ids,
        context_len=m.context_len,
        block_size=m.block_size,
        attention_backend=m.attention_backend,
        features=m.features,
        dtype=m.dtype,
    )


def model_from_pb(m: pb.ModelInfo) -> ModelInfo:
    """What a service serves."""
    return ModelInfo(
        name=m.name,
        vocab_size=m.vocab_size,
        tokenizer_fingerprint=m.tokenizer_fingerprint,
        weights_fingerprint=m.weights_fingerprint,
        noise_version=m.noise_version,
        row_invariant=m.row_invariant,
        eos_token_ids=tuple(m.eos_token_ids),
        context_len=m.context_len,
        block_size=m.block_size,
        attention_backend=m.attention_backend,
        features=tuple(m.features),
        dtype=m.dtype,
    )


# What one stream message is made of: for each dataclass its field and its encoder. A
# singular field keeps the latest.
_Encoder = tuple[str, Callable[[Any], Any]]
_TO_TARGET: dict[type, _Encoder] = {
    OpenSequence: ("opens", _open_to_pb),
    Proposal: ("proposals", _proposal_to_pb),
    CloseSequence: ("closes", _close_to_pb),
    Heartbeat: ("heartbeats", _heartbeat_to_pb),
}
_TO_DRAFT: dict[type, _Encoder] = {
    OpenSequence: ("opens", _open_to_pb),
    Commit: ("commits", _commit_to_pb),
    CloseSequence: ("closes", _close_to_pb),
    Heartbeat: ("heartbeats", _heartbeat_to_pb),
}
_FROM_TARGET: dict[type, _Encoder] = {
    Verdict: ("verdicts", _verdict_to_pb),
    Progress: ("progress", _progress_to_pb),
    EngineStatus: ("status", status_to_pb),
    Heartbeat: ("heartbeats", _heartbeat_to_pb),
    Draining: ("draining", _draining_to_pb),
}
_FROM_DRAFT: dict[type, _Encoder] = {
    Proposal: ("proposals", _proposal_to_pb),
    Refusal: ("refusals", _refusal_to_pb),
    EngineStatus: ("status", status_to_pb),
    Heartbeat: ("heartbeats", _heartbeat_to_pb),
    Draining: ("draining", _draining_to_pb),
}
_SINGULAR = frozenset({"status", "draining"})


def _fields(items: Iterable[object], encoders: dict[type, _Encoder]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for item in items:
        name, encode = encoders[type(item)]
        if name in _SINGULAR:
            fields[name] = encode(item)
        else:
            fields.setdefault(name, []).append(encode(item))
    return fields


def verify_request(items: Iterable[TargetEvent | Heartbeat]) -> target_pb2.VerifyRequest:
    """One message to a target."""
    return target_pb2.VerifyRequest(**_fields(items, _TO_TARGET))


def verify_response(items: Iterable[TargetReply]) -> target_pb2.VerifyResponse:
    """One message from a target."""
    return target_pb2.VerifyResponse(**_fields(items, _FROM_TARGET))


def propose_request(items: Iterable[DraftEvent | Heartbeat]) -> draft_pb2.ProposeRequest:
    """One message to a draft."""
    return draft_pb2.ProposeRequest(**_fields(items, _TO_DRAFT))


def propose_response(items: Iterable[DraftReply]) -> draft_pb2.ProposeResponse:
    """One message from a draft."""
    return draft_pb2.ProposeResponse(**_fields(items, _FROM_DRAFT))


def target_replies(m: target_pb2.VerifyResponse) -> Iterator[TargetReply]:
    """What a target said, verdicts in order."""
    yield from map(heartbeat_from_pb, m.heartbeats)
    yield from map(_progress_from_pb, m.progress)
    yield from map(_verdict_from_pb, m.verdicts)
    if m.HasField("status"):
        yield status_from_pb(m.status)
    if m.HasField("draining"):
        yield _draining_from_pb(m.draining)


def draft_replies(m: draft_pb2.ProposeResponse) -> Iterator[DraftReply]:
    """What a draft said, proposals in order."""
    yield from map(heartbeat_from_pb, m.heartbeats)
    yield from map(_refusal_from_pb, m.refusals)
    yield from map(_proposal_from_pb, m.proposals)
    if m.HasField("status"):
        yield status_from_pb(m.status)
    if m.HasField("draining"):
        yield _draining_from_pb(m.draining)


def target_events(m: target_pb2.VerifyRequest) -> Iterator[Proposal | CloseSequence]:
    """Proposals and closes; opens go one by one through `open_from_pb`, which may raise."""
    yield from map(_proposal_from_pb, m.proposals)
    yield from map(_close_from_pb, m.closes)


def draft_events(m: draft_pb2.ProposeRequest) -> Iterator[Commit | CloseSequence]:
    """Commits and closes; opens go one by one through `open_from_pb`, which may raise."""
    yield from map(_commit_from_pb, m.commits)
    yield from map(_close_from_pb, m.closes)
