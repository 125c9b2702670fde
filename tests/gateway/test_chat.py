"""`tandem chat`: from a pipe, and by hand at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from common.types import OpenSequence, Verdict
from gateway.cli import app
from tests.gateway.fakes import TOKENIZER, FakeTarget, World, ending, in_world, until, verdicts

# A job in the background ignores interruptions, and so do its children. Undone in the child: a
# `preexec_fn` would run between fork and exec, where a process with gRPC's threads can hang.
COMMAND = [
    *(sys.executable, "-c"),
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from gateway.cli import app; app()",
    "chat",
]


async def say(w: World, *lines: str, flags: tuple[str, ...] = ()) -> Result:
    """A chat of these lines, from a pipe."""
    args = ["chat", "--gateway", w.address, *flags]
    text = "".join(f"{line}\n" for line in lines)
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, args, input=text))


def prompts(w: World) -> list[str]:
    """What the target was asked, with `|` before every turn."""
    texts = (
        "".join(TOKENIZER.decode([i]) or "|" for i in opened.token_ids) for opened in w.target.opens
    )
    return [text.removesuffix("|assistant:") for text in texts]


class Echo(FakeTarget):
    """Answers with a count."""

    def opened(self, sequence: OpenSequence) -> None:
        self.say(*verdicts(sequence, [ending(f"{len(self.opens)}!")]))


def test_a_conversation_is_remembered() -> None:
    async def test(w: World) -> None:
        result = await say(w, "one", "", "  two ", "three", flags=("--system", "be brief"))
        assert result.exit_code == 0
        assert result.stdout == "1!\n2!\n3!\n"
        assert prompts(w)[-1] == (
            "|system:be brief|user:one|assistant:1!|user:two|assistant:2!|user:three"
        )

    in_world(test, target=Echo())


def test_commands_change_what_comes_after_them() -> None:
    async def test(w: World) -> None:
        result = await say(
            w,
            *("/undo", "/stats", "one", "/undo", "two", "/temperature 0", "/system kind"),
            *("three", "/temperature hot", "/new", "/system", "four", "/stats", "/exit", "five"),
            flags=("--temperature", "0.5", "--max-tokens", "9", "--seed", "3"),
        )
        assert result.exit_code == 0
        assert prompts(w) == [
            "|user:one",
            "|user:two",
            "|system:kind|user:two|assistant:2!|user:three",
            "|user:four",
        ]
        asked = [opened.sampling for opened in w.target.opens]
        assert [sampling.temperature for sampling in asked] == [0.5, 0.5, 0.0, 0.0]
        assert {(sampling.max_tokens, sampling.seed) for sampling in asked} == {(9, 3)}
        assert "delivered 2" in result.stdout
        for note in ("nothing has been said", "nothing has been answered", '"hot" is no number'):
            assert note in result.stderr

    in_world(test, target=Echo())


@pytest.mark.parametrize(("line", "says"), [("/help", "/undo"), ("/what", "no /what; there is")])
def test_help_lists_the_commands(line: str, says: str) -> None:
    async def test(w: World) -> None:
        result = await say(w, line)
        assert says in result.stdout
        assert "Ctrl-D ends the chat" in result.stdout
        assert w.target.opens == []

    in_world(test)


def test_the_oldest_turns_go_when_the_context_is_full() -> None:
    async def test(w: World) -> None:
        first, second, third = "a" * 500, "b" * 300, "c" * 300
        result = await say(w, first, second, third, "d" * 990, "e")
        # With the third the first no longer fits; what never fits is an error, which ends a pipe.
        assert prompts(w) == [
            f"|user:{first}",
            f"|user:{first}|assistant:1!|user:{second}",
            f"|user:{second}|assistant:2!|user:{third}",
        ]
        assert result.stderr.count("its oldest question is forgotten") == 3
        assert "input: is " in result.stderr
        assert result.exit_code == 1

    in_world(test, target=Echo())


def test_drafts_can_be_shown() -> None:
    async def test(w: World) -> None:
        ids = TOKENIZER.encode("hello")
        w.target.script = [Verdict(0, 0, 4, 4, ids), ending("!")]
        result = await say(w, "hi", flags=("--show-drafts",))
        assert result.stdout == "hello!\n"

    in_world(test)


def test_without_a_gateway_it_fails() -> None:
    result = CliRunner().invoke(app, ["chat", "--gateway", "127.0.0.1:1"], input="hi\n")
    assert result.exit_code == 1
    assert result.stderr == 'tandem: no gateway at 127.0.0.1:1; start one with "tandem up"\n'


def test_a_failure_ends_a_pipe() -> None:
    async def test(w: World) -> None:
        result = await say(w, "hi", "ho", flags=("--model", "huge"))
        assert result.exit_code == 1
        assert result.stderr.startswith('tandem: --model: "huge" is not served')
        assert len(result.stderr.splitlines()) == 1

    in_world(test)


class Terminal:
    """A chat by hand: what is typed goes in, what is shown comes out."""

    def __init__(self, address: str) -> None:
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--gateway", address],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(inner)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    async def until(self, holds: Callable[[str], bool], what: str) -> None:
        """Wait until what has been shown is so."""
        os.set_blocking(self._end, False)

        def look() -> bool:
            with contextlib.suppress(OSError):  # nothing new, or the other end is closed
                self.shown += os.read(self._end, 65536).decode(errors="replace")
            return holds(self.shown)

        await until(look, f"{what} in {self.shown!r}", 30)

    async def close(self) -> int:
        code = await asyncio.to_thread(self.process.wait, 20)
        os.close(self._end)
        return code


def test_by_hand_an_interruption_stops_the_answer_and_not_the_chat() -> None:
    async def test(w: World) -> None:
        terminal = Terminal(w.address)
        try:
            await terminal.until(lambda s: "talks with tiny" in s and "> " in s, "the prompt")
            terminal.type("count\n")
            await until(lambda: w.target.opens, "the question")
            w.target.say(*verdicts(w.target.opens[0], ["one, ", "two"]))
            await terminal.until(lambda s: "one, two" in s, "the answer")
            terminal.process.send_signal(signal.SIGINT)
            await terminal.until(lambda s: "[stopped]" in s, "the stop")
            await until(lambda: w.target.closes, "the close")
            w.target.script = [ending("three")]
            terminal.type("go on\n")
            await terminal.until(lambda s: "three" in s and s.endswith("> "), "the next answer")
            assert prompts(w)[-1] == "|user:count|assistant:one, two|user:go on"
            terminal.process.send_signal(signal.SIGINT)
            await terminal.until(lambda s: "Ctrl-D ends the chat" in s, "the hint")
            terminal.type("x" * 995 + "\n")  # fails: too long for the context
            await terminal.until(lambda s: "tandem: input: is " in s, "the error")
            terminal.type("\x04")
            assert await terminal.close() == 0
        finally:
            terminal.process.kill()

    in_world(test)
