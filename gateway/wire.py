"""What clients hear, as dataclasses inside and protobuf at the edge.

`api.py` encodes, `client.py` decodes.
"""

from __future__ import annotations

from tandem.v1 import gateway_pb2 as pb

from common.types import FinishReason, Rule
from common.wire import (
    duration,
    finish_reason_from_pb,
    finish_reason_to_pb,
    model_from_pb,
    model_to_pb,
    origins_from_pb,
    origins_to_pb,
    rule_from_pb,
    rule_to_pb,
    seconds,
    status_from_pb,
    status_to_pb,
    top_logprobs_from_pb,
    top_logprobs_to_pb,
)
from gateway.types import (
    Choice,
    Delta,
    Event,
    Explanation,
    Finding,
    Finished,
    GatewayStatus,
    Generation,
    GenerationTiming,
    PeerKind,
    PeerState,
    PeerStatus,
    Progress,
    Severity,
    SpeculationFigures,
    Started,
    Usage,
)


def _started_to_pb(s: Started) -> pb.Started:
    return pb.Started(
        request_id=s.request_id,
        seed=s.seed,
        rule=rule_to_pb(s.rule),
        model=s.model,
        weights_fingerprint=s.weights_fingerprint,
        num_prompt_tokens=s.num_prompt_tokens,
        max_lookahead=s.max_lookahead,
        n=s.n,
        num_prefix_tokens=s.num_prefix_tokens,
    )


def _started_from_pb(m: pb.Started) -> Started:
    return Started(
        request_id=m.request_id,
        seed=m.seed,
        rule=rule_from_pb(m.rule, Rule.COUPLED),
        model=m.model,
        weights_fingerprint=m.weights_fingerprint,
        num_prompt_tokens=m.num_prompt_tokens,
        max_lookahead=m.max_lookahead,
        n=max(1, m.n),
        num_prefix_tokens=m.num_prefix_tokens,
    )


def _delta_to_pb(d: Delta) -> pb.Delta:
    return pb.Delta(
        text=d.text,
        token_ids=d.token_ids,
        origins=origins_to_pb(d.origins),
        text_ends=d.text_ends,
        index=d.index,
        logprobs=d.logprobs,
        top_logprobs=map(top_logprobs_to_pb, d.top_logprobs),
    )


def _delta_from_pb(m: pb.Delta) -> Delta:
    return Delta(
        text=m.text,
        token_ids=tuple(m.token_ids),
        origins=origins_from_pb(m.origins),
        text_ends=tuple(m.text_ends),
        index=m.index,
        logprobs=tuple(m.logprobs),
        top_logprobs=tuple(map(top_logprobs_from_pb, m.top_logprobs)),
    )


def _finished_to_pb(f: Finished) -> pb.Finished:
    usage, figures, timing = f.usage, f.speculation, f.timing
    return pb.Finished(
        reason=finish_reason_to_pb(f.reason),
        usage=pb.Usage(
            prompt=usage.prompt,
            cached=usage.cached,
            delivered=usage.delivered,
            discarded=usage.discarded,
        ),
        speculation=pb.SpeculationFigures(
            steps=figures.steps,
            drafted=figures.drafted,
            tested=figures.tested,
            accepted=figures.accepted,
            accepted_per_position=figures.accepted_per_position,
            stale=figures.stale,
            undrafted_steps=figures.undrafted_steps,
        ),
        timing=pb.GenerationTiming(
            total=duration(timing.total_seconds),
            time_to_first_token=duration(timing.time_to_first_token_seconds),
            queue=duration(timing.queue_seconds),
            prefill=duration(timing.prefill_seconds),
            steps=duration(timing.steps_seconds),
            wire=duration(timing.wire_seconds),
            gateway=duration(timing.gateway_seconds),
        ),
        stop=f.stop,
        explanation=explanation_to_pb(f.explanation) if f.explanation else None,
        index=f.index,
    )


def _finished_from_pb(m: pb.Finished) -> Finished:
    usage, figures, timing = m.usage, m.speculation, m.timing
    return Finished(
        reason=finish_reason_from_pb(m.reason) or FinishReason.LENGTH,
        usage=Usage(usage.prompt, usage.cached, usage.delivered, usage.discarded),
        speculation=SpeculationFigures(
            figures.steps,
            figures.drafted,
            figures.tested,
            figures.accepted,
            tuple(figures.accepted_per_position),
            figures.stale,
            figures.undrafted_steps,
        ),
        timing=GenerationTiming(
            seconds(timing.total),
            seconds(timing.time_to_first_token),
            seconds(timing.queue),
            seconds(timing.prefill),
            seconds(timing.steps),
            seconds(timing.wire),
            seconds(timing.gateway),
        ),
        stop=m.stop,
        explanation=explanation_from_pb(m.explanation) if m.HasField("explanation") else None,
        index=m.index,
    )


def explanation_to_pb(e: Explanation) -> pb.Explanation:
    """What bounded a request."""
    return pb.Explanation(
        request_id=e.request_id,
        summary=e.summary,
        findings=[
            pb.Finding(
                kind=f.kind,
                severity=pb.Severity.Value(f"SEVERITY_{f.severity.name}"),
                what=f.what,
                numbers=[pb.Figure(name=name, value=value) for name, value in f.numbers],
                setting=f.setting,
            )
            for f in e.findings
        ],
    )


def explanation_from_pb(m: pb.Explanation) -> Explanation:
    """What bounded a request; a severity that we don't know is a note."""
    severities = {pb.Severity.Value(f"SEVERITY_{s.name}"): s for s in Severity}
    return Explanation(
        request_id=m.request_id,
        summary=tuple(m.summary),
        findings=tuple(
            Finding(
                kind=f.kind,
                severity=severities.get(f.severity, Severity.NOTE),
                what=f.what,
                numbers=tuple((n.name, n.value) for n in f.numbers),
                setting=f.setting,
            )
            for f in m.findings
        ),
    )


def event_to_pb(event: Event) -> pb.StreamGenerateResponse:
    """One event of a stream."""
    if isinstance(event, Started):
        return pb.StreamGenerateResponse(started=_started_to_pb(event))
    if isinstance(event, Progress):
        progress = pb.GenerationProgress(
            num_ahead=event.num_ahead, num_prefilled=event.num_prefilled
        )
        return pb.StreamGenerateResponse(progress=progress)
    if isinstance(event, Delta):
        return pb.StreamGenerateResponse(delta=_delta_to_pb(event))
    return pb.StreamGenerateResponse(finished=_finished_to_pb(event))


def event_from_pb(m: pb.StreamGenerateResponse) -> Event | None:
    """One event of a stream; None for one that a newer gateway knows and we don't."""
    match m.WhichOneof("event"):
        case "started":
            return _started_from_pb(m.started)
        case "progress":
            return Progress(m.progress.num_ahead, m.progress.num_prefilled)
        case "delta":
            return _delta_from_pb(m.delta)
        case "finished":
            return _finished_from_pb(m.finished)
    return None


def generation_to_pb(g: Generation) -> pb.GenerateResponse:
    """The whole texts."""
    first, *further = g.choices
    return pb.GenerateResponse(
        started=_started_to_pb(g.started),
        text=first.text,
        token_ids=first.token_ids,
        origins=origins_to_pb(first.origins),
        finished=_finished_to_pb(first.finished),
        logprobs=first.logprobs,
        top_logprobs=map(top_logprobs_to_pb, first.top_logprobs),
        further_choices=map(_choice_to_pb, further),
    )


def generation_from_pb(m: pb.GenerateResponse) -> Generation:
    """The whole texts."""
    further = (_choice_from_pb(choice.index, choice) for choice in m.further_choices)
    return Generation(_started_from_pb(m.started), (_choice_from_pb(0, m), *further))


def _choice_to_pb(c: Choice) -> pb.Choice:
    return pb.Choice(
        index=c.index,
        text=c.text,
        token_ids=c.token_ids,
        origins=origins_to_pb(c.origins),
        finished=_finished_to_pb(c.finished),
        logprobs=c.logprobs,
        top_logprobs=map(top_logprobs_to_pb, c.top_logprobs),
    )


def _choice_from_pb(index: int, m: pb.Choice | pb.GenerateResponse) -> Choice:
    return Choice(
        index=index,
        text=m.text,
        token_ids=tuple(m.token_ids),
        origins=origins_from_pb(m.origins),
        finished=_finished_from_pb(m.finished),
        logprobs=tuple(m.logprobs),
        top_logprobs=tuple(map(top_logprobs_from_pb, m.top_logprobs)),
    )


def _peer_to_pb(p: PeerStatus) -> pb.PeerStatus:
    known = p.round_trip_seconds is not None
    return pb.PeerStatus(
        kind=pb.PeerKind.Value(f"PEER_KIND_{p.kind.name}"),
        address=p.address,
        state=pb.PeerState.Value(f"PEER_STATE_{p.state.name}"),
        detail=p.detail,
        model=model_to_pb(p.model) if p.model else None,
        engine=status_to_pb(p.engine) if p.engine else None,
        round_trip=duration(p.round_trip_seconds or 0.0) if known else None,
        num_sequences=p.num_sequences,
    )


def _peer_from_pb(m: pb.PeerStatus) -> PeerStatus:
    return PeerStatus(
        kind=PeerKind[pb.PeerKind.Name(m.kind).removeprefix("PEER_KIND_")],
        address=m.address,
        state=PeerState[pb.PeerState.Name(m.state).removeprefix("PEER_STATE_")],
        detail=m.detail,
        model=model_from_pb(m.model) if m.HasField("model") else None,
        engine=status_from_pb(m.engine) if m.HasField("engine") else None,
        round_trip_seconds=seconds(m.round_trip) if m.HasField("round_trip") else None,
        num_sequences=m.num_sequences,
    )


def gateway_status_to_pb(s: GatewayStatus) -> pb.GetStatusResponse:
    """The gateway and its peers."""
    return pb.GetStatusResponse(
        version=s.version,
        num_live_requests=s.num_live_requests,
        peers=[_peer_to_pb(p) for p in s.peers],
    )


def gateway_status_from_pb(m: pb.GetStatusResponse) -> GatewayStatus:
    """The gateway and its peers."""
    return GatewayStatus(m.version, m.num_live_requests, tuple(map(_peer_from_pb, m.peers)))
