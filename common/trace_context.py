"""Who is traced: the caller's W3C trace context, and the sampler."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import SpanContext, TraceFlags

log = logging.getLogger(__name__)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def parse_traceparent(text: str) -> SpanContext | None:
    """The context that a W3C `traceparent` names; None if it names none."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(int(found[4], 16)))


def format_traceparent(context: SpanContext) -> str:
    """A context as a W3C `traceparent`."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


@dataclass(frozen=True)
class Sampling:
    """Which requests are traced, as `OTEL_TRACES_SAMPLER` has it."""

    root: Sampler = ALWAYS_ON
    parent_based: bool = True  # whoever is asked first decides for all below

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Sampling:
        """By default all requests whose caller has not decided otherwise."""
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
        root: Sampler = ALWAYS_ON
        match name.removeprefix("parentbased_"):
            case "always_on":
                pass
            case "always_off":
                root = ALWAYS_OFF
            case "traceidratio":
                root = TraceIdRatioBased(_ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "")))
            case _:
                log.warning("OTEL_TRACES_SAMPLER: %r is not known; tracing all requests", name)
                return cls()
        return cls(root, name.startswith("parentbased_"))

    def decide(self, trace_id: int, name: str, parent: SpanContext | None) -> bool:
        """Whether a span of this name is to be made."""
        if parent is not None and self.parent_based:
            return parent.trace_flags.sampled
        return self.root.should_sample(None, trace_id, name).decision is Decision.RECORD_AND_SAMPLE


def _ratio(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        log.warning("OTEL_TRACES_SAMPLER_ARG: %r is no number; tracing all requests", text)
        return 1.0
