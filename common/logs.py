"""Log records with fields: which request, which sequence, which trace.

    log.info("finished", extra=fields(request_id="r1", tokens=96))

writes, as text, `... finished request_id=r1 tokens=96` and, as JSON, an object with those
fields. Texts of prompts and answers are logged nowhere, unless a flag asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from common.config import ServiceConfig

_KEY = "tandem_fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Fields of one record, for `extra`; None and empty texts are left out."""
    return {_KEY: {name: value for name, value in values.items() if value not in (None, "")}}


def set_up(config: ServiceConfig) -> None:
    """Let this process log to standard error, as its flags say."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if config.log_format == "json" else TextFormatter
    handler.setFormatter(formatter(config.name))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """A line to read, its fields at the end."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback, which comes below it."""
        pairs = (f"{name}={_shown(value)}" for name, value in _fields_of(record).items())
        return " ".join([super().formatMessage(record), *pairs])


class JsonFormatter(logging.Formatter):
    """An object a line; a traceback is a field of it."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in _fields_of(record).items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, _KEY, {})
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # A line stays a line, whatever a client has put into its request id.
    return text if text.isprintable() and not set(text) & set(' ="') else json.dumps(text)
