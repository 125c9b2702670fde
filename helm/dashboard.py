"""The Grafana dashboard, out of the list of panels below: `python -m helm.dashboard`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tandem") / "files" / "dashboard.json"
WIDTH, HEIGHT = 24, 8
ALL = '{model=~"$model", pool=~"$pool"}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A graph: its curves as (legend, expression); $ALL stands for the chosen model and pool."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    about: str = ""
    stacked: bool = False


def _rate(name: str, by: str, window: str = "$__rate_interval") -> str:
    return f"sum by ({by}) (rate(tandem_{name}$ALL[{window}]))"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    inner = f"sum by (le) (rate(tandem_{name}_bucket$ALL[$__rate_interval]))"
    return tuple(
        (f"p{round(100 * q)}", f"histogram_quantile({q}, {inner})") for q in (0.5, 0.95, 0.99)
    )


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests by ending", "reqps", (
                ("{{finish_reason}}", _rate("requests_total", "finish_reason")),
            ), stacked=True),
            Panel("Tokens", "short", (
                ("decided", "sum(tandem:tokens:rate1m$ALL)"),
                ("{{kind}}", _rate("generation_tokens_total", "kind")),
                ("prompt", _rate("prompt_tokens_total", "pool")),
            ), "Tokens a second; delivered and discarded are counted when a request has ended."),
            Panel("Running and waiting", "short", (
                ("running {{instance}}", "tandem_num_requests_running$ALL"),
                ("waiting {{instance}}", "tandem_num_requests_waiting$ALL"),
                ("at the gateway {{instance}}", "tandem_num_live_requests$ALL"),
            )),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
            Panel("Time between tokens", "s", _quantiles("inter_token_latency_seconds")),
            Panel("Whole request", "s", _quantiles("e2e_request_latency_seconds")),
            Panel("Queue", "s", _quantiles("request_queue_time_seconds")),
            Panel("Where the time goes", "percentunit", (
                ("{{part}}", _rate("request_part_seconds_total", "part")
                 + " / on () group_left () "
                 "sum(rate(tandem_e2e_request_latency_seconds_sum$ALL[$__rate_interval]))"),
            ), "Parts of the time of the requests that have ended.", stacked=True),
        ),
    ),
    (
        "Drafting",
        (
            Panel("Acceptance", "percentunit", (
                ("{{model}} {{pool}}", "tandem:acceptance:ratio5m$ALL"),
            ), "Draft tokens accepted of those tested."),
            Panel("Tokens a step", "short", (
                ("{{model}} {{pool}}", "tandem:tokens_per_step:ratio5m$ALL"),
            ), "Tokens that a sequence gains in one step; 1 without drafts."),
            Panel("Accepted by place in the run", "percentunit", (
                ("{{position}}", _rate("spec_decode_num_accepted_tokens_per_pos_total", "position")
                 + " / on () group_left () "
                 "sum(rate(tandem_spec_decode_num_drafts_total$ALL[$__rate_interval]))"),
            ), "How often a run was accepted as far as that."),
            Panel("Draft tokens", "short", (
                ("drawn", _rate("draft_tokens_total", "pool")),
                ("tested", _rate("spec_decode_num_draft_tokens_total", "pool")),
                ("accepted", _rate("spec_decode_num_accepted_tokens_total", "pool")),
            )),
            Panel("Stale draft tokens by cause", "short", (
                ("{{reason}}", _rate("stale_proposals_total", "reason")),
            ), stacked=True),
            Panel("Draft at hand", "short", (
                ("draft {{instance}}", "tandem_draft_available$ALL"),
                ("re-opened, {{reason}}", _rate("sequence_reopens_total", "reason")),
            )),
        ),
    ),
    (
        "Target",
        (
            Panel("Step", "s", (
                ("p50", "tandem:step_seconds:p50_5m$ALL"),
                ("p95", "tandem:step_seconds:p95_5m$ALL"),
                ("p99", "tandem:step_seconds:p99_5m$ALL"),
            )),
            Panel("Batch", "short", (
                ("sequences a step", _rate("step_num_sequences_sum", "pool")
                 + " / " + _rate("step_num_sequences_count", "pool")),
                ("rows a step", _rate("step_num_rows_sum", "pool")
                 + " / " + _rate("step_num_rows_count", "pool")),
            )),
            Panel("KV cache in use", "percentunit", (
                ("{{instance}}", "tandem_kv_cache_usage_ratio$ALL"),
            )),
            Panel("Preemptions", "short", (
                ("{{instance}}", _rate("num_preemptions_total", "instance")),
            )),
            Panel("Prefix cache", "percentunit", (
                ("hits", _rate("prefix_cache_hits_total", "pool")
                 + " / (" + _rate("prefix_cache_queries_total", "pool") + " > 0)"),
            )),
            Panel("Event loop a step", "s", _quantiles("event_loop_seconds"),
                  "Processor time that the event loop takes for one step."),
        ),
    ),
    (
        "Processes",
        (
            Panel("Round trip", "s", (
                ("{{peer}} {{instance}}", "tandem_peer_round_trip_seconds$ALL"),
            )),
            Panel("Builds", "short", (
                ("{{service}} {{version}}",
                 'sum by (service, version) (tandem_build_info{pool=~"$pool"})'),
            )),
            Panel("Spans dropped", "short", (
                ("{{service}}", "sum by (service)"
                 ' (rate(tandem_spans_dropped_total{pool=~"$pool"}[$__rate_interval]))'),
            )),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        width = WIDTH // min(3, len(row))
        for i, panel in enumerate(row):
            column, line = i % 3, i // 3
            place = {"x": column * width, "y": y + 1 + line * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(panel, place))
        y += 1 + HEIGHT * -(-len(row) // 3)
    for i, made in enumerate(panels, start=1):
        made["id"] = i
    return {
        "title": "Tandem",
        "uid": "tandem",
        "tags": ["tandem", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expr.replace("$ALL", ALL),
                "legendFormat": legend,
                "exemplar": "_bucket" in expr,
            }
            for i, (legend, expr) in enumerate(panel.curves)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": query,
            "includeAll": True,
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        labels("pool", "label_values(tandem_build_info, pool)"),
        labels("model", 'label_values(tandem_num_requests_running{pool=~"$pool"}, model)'),
    ]


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE} written\n")
