"""`tandem trace`: waits, lists, draws and writes."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from common.errors import ConfigurationError
from gateway.cli import app, viewing
from gateway.cli.viewing import Viewer, parse_rounds
from gateway.tracing import Store
from gateway.tracing.words import Words, from_target
from tests.gateway.fakes import FILES, TOKENIZER, FakeTarget
from tests.gateway.test_trace_receiver import send
from tests.gateway.traces import TraceMaker, drafted, simple


class Watched:
    """A viewer and what it has printed."""

    def __init__(self, store: Store, html: Path | None = None) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, width=110, color_system=None, highlight=False)
        self.viewer = Viewer(store, console, Words(TOKENIZER), html)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def test_requests_are_listed_once_and_when_they_are_whole(tmp_path: Path) -> None:
    store = Store()
    w = Watched(store, tmp_path / "new" / "page.html")
    first, second = simple(drafted(3)), simple(drafted(4), number=2, request_id="req-2")
    store.add(first.read("gateway"))
    w.viewer.list_ended()
    assert w.lines == []  # the target has not told its part
    store.add(second.read())
    store.add(first.read("target", "draft"))
    for _ in range(2):
        w.viewer.list_ended()
    assert [line.split()[:2] for line in w.lines] == [["1", "req-1"], ["2", "req-2"]]
    assert 'data-request-id="req-2"' in (tmp_path / "new" / "page.html").read_text()


def test_what_does_not_come_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    w = Watched(store)
    store.add(simple(drafted(3)).read("gateway", "target"))
    assert w.viewer.wait_for("req-1", 0.0) is not None
    assert w.viewer.wait_for("another", 0.0) is None
    monkeypatch.setattr(viewing, "SETTLE_SECONDS", 0.0)
    found = w.viewer.wait_for("req-1")
    assert found is not None
    assert found.missing
    w.viewer.list_ended()
    assert "partial" in w.lines[0]


@pytest.mark.parametrize("name", ["req-1", "last", f"{1:032x}", f"{1:032x}"[:12]])
def test_a_request_is_waited_for(name: str) -> None:
    store, t = Store(), simple(drafted(3))
    store.add(t.read("target"))
    threading.Timer(0.05, lambda: store.add(t.read())).start()
    found = Watched(store).viewer.wait_for(name, 10)
    assert found is not None
    assert found.complete


def test_rounds_are_named_from_one() -> None:
    assert parse_rounds("") is None
    assert parse_rounds("20-35") == slice(19, 35)
    assert parse_rounds("7") == slice(6, 7)
    for text in ("0", "5-4", "a", "1-"):
        with pytest.raises(ConfigurationError, match="must be like 20-35"):
            parse_rounds(text)


def trace(t: TraceMaker, *args: str) -> Result:
    """Run the command, and send it a trace as soon as it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    sender = threading.Thread(target=send, args=(address, t))
    sender.start()
    result = CliRunner().invoke(app, ["trace", "--listen", address, *args])
    sender.join()
    return result


def test_the_command_shows_one_request(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "page.html"
    result = trace(
        simple(drafted(40)),
        *("--request", "last", "--html", str(file), "--tokenizer", str(tmp_path)),
        *("--rounds", "2-3"),
    )
    assert result.exit_code == 0, result.output
    assert "req-1  finished, length" in result.stdout
    assert "◂p1" in result.stdout
    assert "2/2 c d e" in result.stdout
    assert " rounds 2 to 3 of 40" in result.stdout
    assert f"wrote {file}" in result.stdout
    assert 'data-tokens="79"' in file.read_text()


def test_without_a_tokenizer_there_are_ids() -> None:
    result = trace(simple(drafted(3)), "--request", "req-1")
    assert result.exit_code == 0, result.output
    assert "2/2 #66 #67 #68" in result.stdout


def test_a_target_hands_out_its_tokenizer() -> None:
    async def main() -> None:
        target = FakeTarget()
        await target.start()
        try:
            words = await asyncio.to_thread(from_target, target.address)
            assert words.text([], TOKENIZER.encode("the")[0]) == "the"
        finally:
            await target.stop()

    asyncio.run(main())


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    cases = {
        ("--rounds", "x"): 'tandem: --rounds: is "x", must be like 20-35\n',
        ("--tokenizer", str(tmp_path)): f"tandem: {tmp_path} holds no tokenizer.json; save a fast"
        " tokenizer there\n",
    }
    for args, message in cases.items():
        result = CliRunner().invoke(app, ["trace", "--listen", "127.0.0.1:0", *args])
        assert (result.exit_code, result.stderr) == (1, message)
    gone = ["trace", "--listen", "127.0.0.1:0", "--target", "127.0.0.1:1"]
    result = CliRunner().invoke(app, gone)
    assert result.exit_code == 1
    assert result.stderr.startswith("tandem: ")
