"""Headless Chromium, for tests that open a page."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BINARY = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="needs a Chromium or Chrome on the PATH (apt-get install chromium)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--virtual-time-budget=3000",
)


class Dom(HTMLParser):
    """The elements of a page, with their attributes and own text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def by_id(self, name: str) -> dict[str, str]:
        return next(attrs for _, attrs in self.elements if attrs.get("id") == name)


def opened(page: Path) -> Dom:
    """The document after its scripts have run; fails on what they complain of."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                BINARY,
                *FLAGS,
                f"--user-data-dir={profile}",
                "--window-size=1280,1400",
                "--enable-logging=stderr",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    return Dom(done.stdout)
