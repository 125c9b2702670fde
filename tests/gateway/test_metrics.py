"""What the gateway counts, and the line that it logs for every request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from common.errors import InvalidRequestError, TandemError
from common.types import StaleCounts, Verdict
from tests.gateway.fakes import TOKENIZER, World, ending, in_world, until, verdicts
from tests.scrape import exposed_names, owned_names, text_of, value


def _read(w: World, name: str, **labels: str) -> float:
    return value(text_of(w.relay.metrics.metrics), name, **labels)


def test_requests_tokens_and_latencies_are_counted() -> None:
    async def test(w: World) -> None:
        tested = Verdict(
            0, 0, 3, 2, TOKENIZER.encode("ell"), num_stale=4, stale=StaleCounts(diverged=4)
        )
        w.target.script = ["h", tested, ending("o.x")]
        events = await w.stream("abc", stop=["."])
        finished = events[-1]
        assert (finished.usage.delivered, finished.usage.discarded) == (6, 1)
        assert _read(w, "requests_total", finish_reason="stop_string") == 1
        assert _read(w, "requests_total") == 1
        assert _read(w, "prompt_tokens_total") == 3
        assert _read(w, "generation_tokens_total", kind="delivered") == 6
        assert _read(w, "generation_tokens_total", kind="discarded") == 1
        for outcome, num in (("tested", 3), ("accepted", 2), ("stale", 4), ("drafted", 0)):
            assert _read(w, "request_draft_tokens_total", outcome=outcome) == num
        for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
            assert _read(w, f"{name}_seconds_count") == 1
        assert _read(w, "inter_token_latency_seconds_count") == 6
        assert _read(w, "request_part_seconds_total", part="steps") >= 0

    in_world(test)


def test_other_endings_have_their_reason() -> None:
    async def test(w: World) -> None:
        with pytest.raises(InvalidRequestError):
            await w.stream("ab", top_p=2.0)
        assert _read(w, "requests_total", finish_reason="refused") == 1
        w.target.script = ["h"]
        task = asyncio.create_task(w.stream("ab"))
        await until(lambda: len(w.target.opens) == 1)
        await until(lambda: _read(w, "num_live_requests") == 1)
        task.cancel()
        await until(lambda: _read(w, "requests_total", finish_reason="cancelled") == 1)
        with pytest.raises(TandemError):
            await w.stream("ab", timeout=0.2)
        await until(lambda: _read(w, "requests_total", finish_reason="deadline") == 1)
        task = asyncio.create_task(w.stream("ab"))
        await until(lambda: len(w.target.opens) == 3)
        await w.target.stop()
        with pytest.raises(TandemError):
            await task
        assert _read(w, "requests_total", finish_reason="error") == 1
        assert _read(w, "requests_total") == 4
        assert _read(w, "generation_tokens_total") == 3

    in_world(test, failover_seconds=0.1)


def test_peers_are_told_at_a_scrape() -> None:
    async def test(w: World) -> None:
        assert _read(w, "target_available", model="tiny") == 1
        await until(lambda: _read(w, "draft_available") == 1)
        await until(lambda: "peer_round_trip_seconds{" in text_of(w.relay.metrics.metrics))
        assert 0 < _read(w, "peer_round_trip_seconds", peer="draft") < 5
        task = asyncio.create_task(w.stream("ab"))
        await until(lambda: w.draft.opens)
        await w.draft.stop()
        await until(lambda: _read(w, "draft_available") == 0)
        await w.draft.start()
        await until(lambda: _read(w, "sequence_reopens_total", reason="draft_returned") == 1)
        assert _read(w, "draft_available") == 1
        w.target.say(*verdicts(w.target.opens[0], [ending("c")]))
        await task
        assert exposed_names(text_of(w.relay.metrics.metrics)) == owned_names("gateway")

    in_world(test, drafted=True)


def test_a_gateway_without_a_draft_does_not_tell_of_one() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("c")]
        await w.stream("ab")
        assert "draft_available{" not in text_of(w.relay.metrics.metrics)

    in_world(test)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = record.__dict__["tandem_fields"]
    return fields


def test_one_line_for_every_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async def test(w: World) -> None:
        with caplog.at_level(logging.INFO, "gateway.records"):
            w.target.script = [Verdict(0, 0, 2, 1, TOKENIZER.encode("he")), ending("llo")]
            await w.stream("secret", request_id="r1")
            await w.stream("secret")
        first, second = map(_fields, caplog.records)
        assert first["request_id"] == "r1"
        assert first["reason"] == "length"
        assert (first["tokens"], first["acceptance"], first["prompt_tokens"]) == (5, 0.5, 6)
        assert 0 < first["seconds"] < 10
        assert "secret" not in str(first) + caplog.text
        assert len(second["request_id"]) == 32

    in_world(test)


def test_prompts_are_logged_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def test(w: World) -> None:
        with caplog.at_level(logging.INFO, "gateway.records"):
            w.target.script = [ending("llo")]
            await w.stream("secret")
        assert _fields(caplog.records[0])["prompt"] == "secret"

    in_world(test, log_prompts=True)
