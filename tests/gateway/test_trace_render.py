"""The picture in the terminal: exact figures, and never wider or longer than a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from gateway.tracing import Request, read
from gateway.tracing.render import listing, listing_header, waterfall
from gateway.tracing.strip import Strip, axis, seconds, ticks, visible
from gateway.tracing.words import Words
from tests.gateway.fakes import TOKENIZER
from tests.gateway.traces import Step, TraceMaker, drafted, simple

THE = TOKENIZER.encode("the")[0]


def printed(what: RenderableType, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def shown(t: TraceMaker, width: int = 100, rounds: slice | None = None) -> list[str]:
    request = read("t", t.read())
    return printed(waterfall(request, Words(TOKENIZER).of(request), width, rounds), width)


def line_of(lines: Sequence[str], begin: str) -> str:
    found = [line for line in lines if line.strip().startswith(begin)]
    assert found, "\n".join(lines)
    return found[0]


def test_the_whole_picture() -> None:
    steps = [Step((), (65,)), Step((66, 67), (66, 67, 68)), Step((69, 70), (69, THE))]
    lines = shown(simple(steps))
    assert lines[0] == (
        " req-1  finished, length  tiny · coupled · temperature 0.7 · lookahead 8 · prompt 10"
    )
    assert lines[1] == (
        " 106 ms  6 tokens  56.6 tok/s  60 ms first  2.00 tok/step in 3  3/4 accepted 75%  1 stale"
    )
    assert lines[3].strip() == "█" * 97 + "░"
    assert lines[4] == (
        " ■ queue 2.0 ms  ■ prefill 38 ms 36%  ■ steps 60 ms 57%  ■ wire 2.0 ms  ■ gateway 3.0 ms"
    )
    gateway = line_of(lines, "gateway")
    assert gateway.index("▼") == pytest.approx(11 + 89 * 60 / 106, abs=1)
    assert "▒" in line_of(lines, "target")
    assert line_of(lines, "draft").count("━") >= 2
    assert line_of(lines, "1  19ms").endswith("  b")
    assert line_of(lines, "2  19ms ◂p1").endswith("  2/2 c d e")
    assert line_of(lines, "3  19ms ◂p2").endswith("  1/2 f g the")


def test_a_guess_is_left_of_the_step_that_consumed_it() -> None:
    row = line_of(shown(simple(drafted(3)), 140), "3  19ms ◂p2")
    guess, way, step = row.index("━"), row.index("┄"), row.index("█")
    assert guess < way < step


def test_guesses_that_nobody_tested_are_told() -> None:
    t = simple(drafted(9))
    for _, span in t.spans:
        if span.name == "target.verify" and len(span.links) and span.links[0].span_id[-1] % 2:
            del span.links[:]
    lines = shown(t)
    assert any("unused p" in line and "not tested" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("num_steps", [1, 20, 512])
def test_it_fits_a_terminal(width: int, num_steps: int) -> None:
    lines = shown(simple(drafted(num_steps), summed=num_steps // 5), width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 40


def test_a_window_of_a_long_request() -> None:
    lines = shown(simple(drafted(60)))
    assert line_of(lines, "rounds 3 to 18").startswith(" rounds 3 to 18 of 60: where most was")
    assert any("╰" in line and "╯" in line for line in lines)
    lines = shown(simple(drafted(60)), rounds=slice(29, 33))
    assert line_of(lines, "rounds 30 to 33").startswith(" rounds 30 to 33 of 60:")
    assert not any(line.strip().startswith("34 ") for line in lines)
    assert shown(simple(drafted(3)), rounds=slice(70, 80))  # beyond the end: none


def test_what_is_not_here_is_said() -> None:
    t = simple(drafted(4), summed=7)
    request = read("t", t.read("gateway", "target"))
    lines = printed(waterfall(request, Words().of(request), 100))
    assert " not here: 1 draft.sequence" in lines
    assert " 7 rounds after the first 4 are in the sums" in lines
    assert line_of(lines, "2  19ms ◂p?").endswith("  2/2 #66 #67 #68")
    assert line_of(lines, "3  19ms ◂p?").endswith("  1/3 #69 ? ? #72")
    request = read("t", t.read("target"))
    lines = printed(waterfall(request, Words().of(request), 100))
    assert lines[0].startswith(" trace t  running")
    assert printed(waterfall(read("t", []), (), 100))


def test_requests_that_did_not_finish() -> None:
    cancelled = simple(drafted(2), events=[("tandem.cancelled", 70.0)], finish="")
    assert shown(cancelled)[0].startswith(" req-1  cancelled  ")
    failed = simple(drafted(2), error="the target was lost", finish="")
    assert shown(failed)[0].startswith(" req-1  failed, the target was lost  ")


def test_the_list() -> None:
    request = read("t", simple(drafted(3)).read())
    assert printed(listing_header()) == [
        "    # request                    state    time   first tokens  tok/s tok/step"
        "       accepted"
    ]
    assert printed(listing(7, request)) == [
        "    7 req-1                   finished  106 ms   60 ms      6   56.6     2.00"
        "       3/5  60%"
    ]
    assert printed(listing(1, replace(request, request_id="x" * 40, missing=("a",)))) == [
        f"    1 {'x' * 20}…    partial  106 ms   60 ms      6   56.6     2.00       3/5  60%"
    ]
    empty: Request = read("t", [])
    assert "running" in printed(listing(1, empty))[0]


def test_numbers_and_texts() -> None:
    values = (0.0004, 0.0099, 0.118, 0.9994, 0.9996, 12.3, 124.0)
    assert [seconds(v) for v in values] == [
        "0.4 ms",
        "9.9 ms",
        "118 ms",
        "999 ms",
        "1.00 s",
        "12.30 s",
        "124 s",
    ]
    assert visible(" a\n\tb\x07") == "·a↵⇥b\ufffd"
    assert list(ticks(0.0, 1.0, 5)) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert axis(30, 0.0, 1.0, "").plain.startswith("╷0.00 s")
    strip = Strip(10, 0.0, 10.0)
    strip.bar(2.0, 4.5, ["a", "b"])
    assert strip.text().plain == "  ██▌     "
    strip.bar(6.5, 6.6, ["a"])
    assert strip.text().plain == "  ██▌ ▐   "
