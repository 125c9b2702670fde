"""What the gateway exposes: told by sessions while they run, by records when they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from common.metrics import Metrics, Reading
from gateway.records import RequestRecord
from gateway.types import Standing


class GatewayMetrics:
    """Counts requests. Methods are called in the event loop's thread."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def opened(self, model: str, num_prompt: int) -> None:
        """A request has been opened at a target."""
        self.metrics.of(model).add("prompt_tokens_total", num_prompt)

    def refused(self, model: str) -> None:
        """A request was not opened."""
        self.metrics.of(model).add("requests_total", 1, "refused")

    def reopened(self, model: str, reason: str) -> None:
        """A live sequence has been opened anew."""
        self.metrics.of(model).add("sequence_reopens_total", 1, reason)

    def first_token(self, model: str, seconds: float, trace_id: str) -> None:
        """The first token is there, so long after the request's arrival."""
        self.metrics.of(model).observe("time_to_first_token_seconds", seconds, trace_id)

    def tokens(self, model: str, num: int, seconds: float, trace_id: str) -> None:
        """Some tokens have come, so long after the verdict before."""
        of_model = self.metrics.of(model)
        for _ in range(num):
            of_model.observe("inter_token_latency_seconds", seconds / num, trace_id)

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        metrics, spent, timing = self.metrics.of(record.model), record.speculation, record.timing
        metrics.add("requests_total", 1, record.ending)
        for kind, num in (
            ("delivered", record.usage.delivered),
            ("discarded", record.usage.discarded),
        ):
            metrics.add("generation_tokens_total", num, kind)
        for outcome, num in (
            ("drafted", spent.drafted),
            ("tested", spent.tested),
            ("accepted", spent.accepted),
            ("stale", spent.stale),
        ):
            metrics.add("request_draft_tokens_total", num, outcome)
        metrics.observe("e2e_request_latency_seconds", timing.total_seconds, record.trace_id)
        if spent.steps:
            metrics.observe("request_queue_time_seconds", timing.queue_seconds, record.trace_id)
        for part, seconds in parts(record).items():
            metrics.add("request_part_seconds_total", max(0.0, seconds), part)

    def watch(
        self,
        standings: Callable[[], Iterable[Standing]],
        live: Callable[[], list[str]],
        failing: Callable[[], Mapping[str, int]],
    ) -> None:
        """Tell at each scrape how things stand; asked for in another thread.

        live: the model of each live request. failing: by kind of peer, the names that can't be
        looked up. Called in the event loop.
        """
        loop = asyncio.get_running_loop()

        def read() -> Iterator[Reading]:
            yield "event_loop_tasks", {}, float(len(asyncio.all_tasks(loop)))
            for kind, num in failing().items():
                yield "discovery_failing", {"peer": kind}, float(num)
            counts = Counter(live())
            for s in standings():
                model = {"model": s.model}
                yield "num_live_requests", model, counts[s.model]
                yield "target_available", model, float(s.num_targets)
                if s.num_drafts is not None:
                    yield "draft_available", model, float(s.num_drafts)
                for peer, seconds in (
                    ("target", s.target_round_trip_seconds),
                    ("draft", s.draft_round_trip_seconds),
                ):
                    if seconds is not None:
                        yield "peer_round_trip_seconds", model | {"peer": peer}, seconds

        self.metrics.at_scrape(read)


def parts(record: RequestRecord) -> dict[str, float]:
    """Where a request's time went, in seconds, by the names of `metric_table.PARTS`."""
    timing = record.timing
    return {
        "queue": timing.queue_seconds,
        "prefill": timing.prefill_seconds,
        "steps": timing.steps_seconds,
        "wire": timing.wire_seconds,
        "gateway": timing.gateway_seconds,
    }
