"""Log records with fields, as lines to read and as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from common import logs
from common.config import ServiceConfig
from common.errors import SequenceError
from common.logs import JsonFormatter, TextFormatter, fields
from common.sequence_log import SequenceLog
from common.types import OpenSequence, Refusal, SamplingParams, StepResult, Verdict


def _record(message: str = "request %s", error: bool = False, **values: object) -> str | object:
    info = None
    if error:
        try:
            raise ValueError("boom")
        except ValueError:
            info = sys.exc_info()
    made = logging.LogRecord("gateway.x", logging.INFO, "x.py", 1, message, ("ended",), info)
    made.__dict__.update(fields(**values))
    return made


def _text(record: object) -> str:
    assert isinstance(record, logging.LogRecord)
    return TextFormatter("gateway").format(record)


def _json(record: object) -> dict[str, object]:
    assert isinstance(record, logging.LogRecord)
    line = JsonFormatter("gateway").format(record)
    assert "\n" not in line
    entry: dict[str, object] = json.loads(line)
    return entry


def test_text_ends_with_the_fields() -> None:
    line = _text(_record(request_id="r1", tokens=96, acceptance=1 / 3, prompt="a b", trace_id=""))
    assert "gateway INFO gateway.x: request ended" in line
    assert line.endswith(' request_id=r1 tokens=96 acceptance=0.333333 prompt="a b"')


@pytest.mark.parametrize("nasty", ["a\nb", 'a"b', "a=b", "\x1b[31m", "a\u2028b"])
def test_a_line_stays_a_line(nasty: str) -> None:
    line = _text(_record(request_id=nasty))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert json.loads(line.partition("request_id=")[2]) == nasty


def test_json_is_an_object_a_line() -> None:
    entry = _json(_record(request_id="r1", tokens=96, prompt="ä\n", level="mine", error=True))
    assert entry["message"] == "request ended"
    assert (entry["level"], entry["service"], entry["logger"]) == ("info", "gateway", "gateway.x")
    assert (entry["request_id"], entry["tokens"], entry["prompt"]) == ("r1", 96, "ä\n")
    assert "ValueError: boom" in str(entry["exception"])
    assert str(entry["time"]).endswith("+00:00")


def test_text_keeps_the_traceback_below_the_line() -> None:
    first, *rest = _text(_record(error=True, request_id="r1")).splitlines()
    assert first.endswith("request_id=r1")
    assert rest[-1] == "ValueError: boom"


def test_nothing_is_added_without_fields() -> None:
    assert _text(_record()).endswith("request ended")
    assert "request_id" not in _json(_record(request_id=None))


@contextlib.contextmanager
def _bare_root() -> Iterator[None]:
    """The root logger as a new process has it."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    logger.handlers[:] = []
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_a_process_logs_as_its_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    with _bare_root():
        logs.set_up(ServiceConfig(log_format="json", log_level="info"))
        logging.getLogger("x").info("hello", extra=fields(sequence_id=4))
        logging.getLogger("x").debug("not this")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["sequence_id"] == 4


def test_sequences_are_logged_with_id_and_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace_id = "ab" * 16
    watched = SequenceLog()
    bad = SequenceError(3, "INVALID_REQUEST", "is empty", "input")
    fault = SequenceError(13, "INTERNAL_FAULT", "no finite logits")
    traced = OpenSequence(
        4, (1, 2), 2, SamplingParams(), traceparent=f"00-{trace_id}-{'c' * 16}-01"
    )
    with caplog.at_level(logging.DEBUG, "common.sequence_log"):
        watched.opened(traced)
        watched.opened(OpenSequence(5, (1, 2), 2, SamplingParams()))
        watched.stepped(StepResult(verdicts=(Verdict(4, 2, 0, 0, (7,)),)))
        watched.stepped(StepResult(verdicts=(Verdict(4, 2, 0, 0, (), error=fault),)))
        watched.stepped(StepResult(refusals=(Refusal(5, bad),)))
        watched.closed(4)
        watched.closed(5)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", "sequence opened"),
        ("DEBUG", "sequence opened"),
        ("ERROR", "sequence given up"),
        ("INFO", "sequence refused"),
        ("DEBUG", "sequence closed"),
        ("DEBUG", "sequence closed"),
    ]
    entries = [_json(record) for record in caplog.records]
    assert [e["sequence_id"] for e in entries] == [4, 5, 4, 5, 4, 5]
    assert [e.get("trace_id") for e in entries] == [trace_id, None] * 3
    assert entries[2]["error"] == "no finite logits"
