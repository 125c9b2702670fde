"""What `tandem trace`, `tandem up --trace` and `tandem demo` show of traces."""

from __future__ import annotations

import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from common.errors import ConfigurationError
from gateway.tracing import Request, Store, requests
from gateway.tracing.html import page
from gateway.tracing.model import Outcome
from gateway.tracing.render import listing, listing_header, waterfall
from gateway.tracing.words import Words

SETTLE_SECONDS = 6.0  # longer than exporters keep spans by default
FORSAKEN_SECONDS = 60.0  # a trace so silent has lost its root
LAST = "last"


def parse_rounds(text: str) -> slice | None:
    """`20-35`, counted from 1, or `20`; None if empty. Raises `ConfigurationError`."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last:
        raise ConfigurationError(f'is "{text}", must be like 20-35', field="--rounds")
    return slice(first - 1, last)


class Viewer:
    """Looks into a store: lists requests as they end, draws them, writes pages."""

    def __init__(
        self,
        store: Store,
        console: Console,
        words: Words,
        html: Path | None = None,
        rounds: slice | None = None,
    ) -> None:
        self._store = store
        self._console = console
        self._words = words
        self._html = html
        self._rounds = rounds
        self._listed: set[tuple[str, str, float]] = set()
        self._read: dict[str, tuple[int, list[Request]]] = {}  # by trace; with number of spans
        self._numbered: list[Request] = []
        self._seen = -1

    def live(self, check: Callable[[], None] = lambda: None) -> None:
        """List requests until interrupted; a number and Enter shows that one."""
        if sys.stdin.isatty():
            self._console.print(Text("a number and Enter shows that request", "dim"))
        self._console.print(listing_header())
        while True:
            self.list_ended()
            check()
            if sys.stdin.isatty() and select.select([sys.stdin], [], [], 0.2)[0]:
                self._show_numbered(sys.stdin.readline().strip())
            elif not sys.stdin.isatty():
                self._store.wait(self._seen, 0.5)

    def list_ended(self) -> None:
        """A line for each request that has ended since; the page shows the last of them."""
        self._seen = self._store.version()
        for request, silence in self._known():
            key = (request.trace_id, request.request_id, request.began_at)
            if key in self._listed or not _settled(request, silence):
                continue
            self._numbered.append(request)
            self._listed.add(key)
            self._console.print(listing(len(self._numbered), request))
            if self._html is not None:
                self._html_of(request)

    def wait_for(self, name: str, timeout_seconds: float | None = None) -> Request | None:
        """The request of that id (or trace id, or `last`), once all its spans are here.

        Returns what is there when the time is over, None if that is nothing.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            seen = self._store.version()
            matching = [pair for pair in self._known() if _matches(pair[0], name)]
            ended = [pair for pair in matching if pair[0].outcome is not Outcome.RUNNING]
            if ended and _settled(*ended[-1]):
                return ended[-1][0]
            if deadline is not None and time.monotonic() >= deadline:
                return matching[-1][0] if matching else None
            self._store.wait(seen, 0.5)

    def show(self, request: Request) -> None:
        """Draw it, and write the page if one is wanted."""
        texts = self._words.of(request)
        hint = "the page has all" if self._html is not None else "--html FILE writes all"
        self._console.print(waterfall(request, texts, self._console.width, self._rounds, hint))
        if self._html is not None:
            self._html_of(request)
            self._console.print(f"\n wrote {self._html}; open it in a browser", highlight=False)

    def _html_of(self, request: Request) -> None:
        assert self._html is not None
        text = page(request, self._words.of(request))
        try:
            self._html.parent.mkdir(parents=True, exist_ok=True)
            part = self._html.with_name(self._html.name + ".part")
            part.write_text(text, "utf-8")
            part.replace(self._html)
        except OSError as error:
            raise ConfigurationError(f"can't be written: {error}", field="--html") from error

    def _known(self) -> list[tuple[Request, float]]:
        """All requests, newest last, with the silence of their traces."""
        found = []
        before, self._read = self._read, {}
        for trace_id, spans, silence in self._store.traces():
            read = before.get(trace_id)
            if read is None or read[0] != len(spans):  # spans are never taken away
                read = len(spans), requests(trace_id, spans)
            self._read[trace_id] = read
            found += [(request, silence) for request in read[1]]
        return sorted(found, key=lambda pair: pair[0].began_at)

    def _show_numbered(self, line: str) -> None:
        if line.isdecimal() and 1 <= int(line) <= len(self._numbered):
            self._console.print()
            self.show(self._numbered[int(line) - 1])
            self._console.print()
            self._console.print(listing_header())
        elif line:
            self._console.print(Text(f"there is no request {line}", "dim"))


def _matches(request: Request, name: str) -> bool:
    return name in (LAST, request.request_id) or (
        len(name) >= 8 and request.trace_id.startswith(name)
    )


def _settled(request: Request, silence: float) -> bool:
    if request.outcome is Outcome.RUNNING:
        return silence > FORSAKEN_SECONDS
    return request.complete or silence > SETTLE_SECONDS
