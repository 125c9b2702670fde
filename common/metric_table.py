"""Every metric that Tandem exposes, and the one service that owns it: a table.

Names carry the prefix `tandem_` where they are exposed; suffixes are those that vLLM's users
know. Each metric has the label `pool` and, unless it tells of the process, `model`. A label's
values are listed here, so the number of series is bounded by this file.
`python -m common.metrics` writes `METRICS.md` from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from common.types import FinishReason, StaleCounts

PREFIX = "tandem_"
TARGET, DRAFT, GATEWAY, EVERY = "target", "draft", "gateway", "every service"
OWNERS = (GATEWAY, TARGET, DRAFT)


class Kind(Enum):
    """What Prometheus calls a type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str  # without the prefix
    kind: Kind
    owner: str
    help: str
    # Label names and all their values; none listed: told by the process, one value each.
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    of_model: bool = True  # False: tells of the process, whatever it serves
    at_scrape: bool = False  # read when it is asked for, not kept

    @property
    def full_name(self) -> str:
        """As it is exposed."""
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels, in order."""
        return (*(("model",) if self.of_model else ()), "pool", *self.labels)

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names of its samples."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.full_name,)
        return tuple(self.full_name + suffix for suffix in ("_bucket", "_count", "_sum"))


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_STEP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_CPU_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

MAX_POSITION = 16
"""Accepted tokens at this place in a run and behind it are counted together."""
POSITIONS = (*map(str, range(MAX_POSITION)), f"{MAX_POSITION}+")
ENDINGS = (*(r.name.lower() for r in FinishReason), "error", "cancelled", "deadline", "refused")
REOPENS = (
    "target_lost", "target_draining", "target_full",
    "draft_lost", "draft_draining", "draft_refused", "draft_returned",
)  # fmt: skip
PARTS = ("queue", "prefill", "steps", "wire", "gateway")

METRICS: tuple[Metric, ...] = (
    Metric("num_requests_running", _G, TARGET, "Sequences that take part in steps."),
    Metric("num_requests_waiting", _G, TARGET, "Sequences that wait to be admitted."),
    Metric("kv_cache_usage_ratio", _G, TARGET, "Part of the KV cache's blocks in use, 0 to 1."),
    Metric("num_preemptions_total", _C, TARGET, "How often a sequence's blocks were taken back."),
    Metric(
        "prefix_cache_queries_total", _C, TARGET,
        "Tokens of admitted sequences, sought in the prefix cache; again after a preemption.",
    ),
    Metric(
        "prefix_cache_hits_total", _C, TARGET,
        "Of these, tokens that the prefix cache or a fork brought and that need not be read.",
    ),
    Metric("step_seconds", _H, TARGET, "Duration of a step.", buckets=_STEP_BUCKETS),
    Metric("step_num_sequences", _H, TARGET, "Sequences in a step.", buckets=_SIZE_BUCKETS),
    Metric("step_num_rows", _H, TARGET, "Rows of a step.", buckets=_SIZE_BUCKETS),
    Metric(
        "event_loop_seconds", _H, TARGET,
        "Processor time that the event loop's thread took from one step to the next.",
        buckets=_CPU_BUCKETS,
    ),
    Metric("committed_tokens_total", _C, TARGET, "Tokens decided."),
    Metric("spec_decode_num_drafts_total", _C, TARGET, "Verdicts that tested draft tokens."),
    Metric("spec_decode_num_draft_tokens_total", _C, TARGET, "Draft tokens tested."),
    Metric("spec_decode_num_accepted_tokens_total", _C, TARGET, "Draft tokens accepted."),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total", _C, TARGET,
        "Draft tokens accepted, by place in the run that was tested; the first is 0.",
        {"position": POSITIONS},
    ),
    Metric(
        "spec_decode_num_paused_total", _C, TARGET,
        "Verdicts that told a draft to pause: drafting does not pay, or the request forbids it.",
    ),
    Metric(
        "draft_wait_seconds_total", _C, TARGET,
        "Time that steps were held back for draft tokens, with one sequence running.",
    ),
    Metric(
        "stale_proposals_total", _C, TARGET,
        "Draft tokens dropped untested. late: the same token was decided before;"
        " diverged: it or one before it differs from what was decided;"
        " superseded: a newer chain replaced its own; malformed: its chain had a gap, an unknown"
        " token or no distribution; finished: it waited when the sequence ended.",
        {"reason": StaleCounts._fields},
    ),
    Metric("draft_num_sequences", _G, DRAFT, "Sequences open in the draft."),
    Metric("draft_kv_cache_usage_ratio", _G, DRAFT, "Part of the draft's blocks in use, 0 to 1."),
    Metric("draft_proposals_total", _C, DRAFT, "Proposals sent."),
    Metric("draft_tokens_total", _C, DRAFT, "Draft tokens drawn."),
    Metric("draft_refusals_total", _C, DRAFT, "Sequences that the draft could not serve."),
    Metric("num_live_requests", _G, GATEWAY, "Requests that are not finished.", at_scrape=True),
    Metric("target_available", _G, GATEWAY, "Targets that are ready.", at_scrape=True),
    Metric(
        "draft_available", _G, GATEWAY,
        "Drafts that are ready and fit; absent if none is configured.", at_scrape=True,
    ),
    Metric(
        "peer_round_trip_seconds", _G, GATEWAY,
        "Last heartbeat's way to the farthest peer and back.",
        {"peer": ("target", "draft")}, at_scrape=True,
    ),
    Metric(
        "event_loop_tasks", _G, GATEWAY,
        "Tasks of the event loop: a few for each peer and live request.",
        of_model=False, at_scrape=True,
    ),
    Metric(
        "discovery_failing", _G, GATEWAY,
        "Names of peers whose last lookup failed, so that their addresses stay as they were.",
        {"peer": ("target", "draft")}, of_model=False, at_scrape=True,
    ),
    Metric(
        "requests_total", _C, GATEWAY,
        "Requests that have ended; refused ones were never opened at a target.",
        {"finish_reason": ENDINGS},
    ),
    Metric("prompt_tokens_total", _C, GATEWAY, "Prompt tokens of requests that were opened."),
    Metric(
        "generation_tokens_total", _C, GATEWAY,
        "Tokens decided for requests that have ended: the client's, or beyond a stop string"
        " or an early end.",
        {"kind": ("delivered", "discarded")},
    ),
    Metric(
        "request_draft_tokens_total", _C, GATEWAY,
        "Draft tokens of requests that have ended, as their final events tell them.",
        {"outcome": ("drafted", "tested", "accepted", "stale")},
    ),
    Metric(
        "time_to_first_token_seconds", _H, GATEWAY, "From a request's arrival to its first token.",
        buckets=_WAIT_BUCKETS,
    ),
    Metric(
        "inter_token_latency_seconds", _H, GATEWAY,
        "Time from verdict to verdict, shared out over the tokens that the later one brought.",
        buckets=_STEP_BUCKETS,
    ),
    Metric(
        "e2e_request_latency_seconds", _H, GATEWAY, "From a request's arrival to its last event.",
        buckets=_REQUEST_BUCKETS,
    ),
    Metric(
        "request_queue_time_seconds", _H, GATEWAY, "From arrival at the target to the first step.",
        buckets=_WAIT_BUCKETS,
    ),
    Metric(
        "request_part_seconds_total", _C, GATEWAY, "Where the time of finished requests went.",
        {"part": PARTS},
    ),
    Metric(
        "sequence_reopens_total", _C, GATEWAY,
        "Live sequences opened anew: at a target that takes another's place, or at a draft.",
        {"reason": REOPENS},
    ),
    Metric(
        "build_info", _G, EVERY, "Always 1.", {"service": OWNERS, "version": ()}, of_model=False,
    ),
    Metric(
        "spans_dropped_total", _C, EVERY, "Spans that were given up instead of being exported.",
        {"service": OWNERS}, of_model=False, at_scrape=True,
    ),
)  # fmt: skip


def owned_by(service: str) -> tuple[Metric, ...]:
    """What a service exposes."""
    return tuple(m for m in METRICS if m.owner in (service, EVERY))


def by_series_name() -> dict[str, Metric]:
    """Every sample's name, and the metric that it belongs to."""
    return {name: m for m in METRICS for name in m.series_names}


def markdown() -> str:
    """The table as a page."""
    lines = [
        "# Metrics",
        "",
        "Made by `python -m common.metrics` from `metric_table.py`; don't edit.",
        "",
        "`--metrics-port` opens an endpoint for Prometheus in each service. Names carry the prefix",
        f"`{PREFIX}`, all metrics the label `pool` (`--pool`). Histograms of latency carry trace",
        "ids as exemplars (OpenMetrics format) where a request was sampled.",
    ]
    for owner in (*OWNERS, EVERY):
        lines += ["", f"## {owner}", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        for m in METRICS:
            if m.owner == owner:
                labels = [*(["`model`"] if m.of_model else [])]
                labels += [f"`{n}` {' '.join(v)}".strip() for n, v in m.labels.items()]
                lines.append(f"| `{m.name}` | {m.kind.value} | {'; '.join(labels)} | {m.help} |")
    return "\n".join(lines) + "\n"
