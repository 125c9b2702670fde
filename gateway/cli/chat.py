"""`tandem chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from common.errors import InvalidRequestError, TandemError
from common.types import FinishReason
from gateway.cli import render
from gateway.cli.flags import (
    GATEWAY,
    AskedModel,
    Gateway,
    MaxTokens,
    ShowDrafts,
    System,
    Temperature,
)
from gateway.cli.telling import stderr, tell_error, told_errors, whole_lines
from gateway.client import Client, Delta, Finished, Message, Options

HELP = """\
/new            forget the conversation
/system TEXT    the system message from now on; without a text: none
/temperature X  from now on; 0: the likeliest token, always
/undo           take the last question and its answer back
/stats          the figures of the last answer
/help, /exit    Ctrl-C stops an answer, Ctrl-D ends the chat"""


@dataclass
class Conversation:
    """What has been said, and how the next answer is asked for."""

    client: Client
    console: Console
    options: Options
    system: str = ""
    show_drafts: bool = False
    turns: list[Message] = field(default_factory=list)  # question, answer, question, ...
    finished: Finished | None = None  # of the last answer that came to its end

    def ask(self, question: str) -> None:
        """Print the answer and remember both; raises `TandemError` if there is none.

        While the gateway finds it too long, the oldest question and its answer go. An answer
        that is broken off is kept as far as it came.
        """
        self.turns.append(Message("user", question))
        pieces: list[str] = []
        try:
            while True:
                try:
                    self._hear(pieces)
                    break
                except InvalidRequestError as error:
                    if error.field != "input" or len(self.turns) < 3 or pieces:
                        raise
                    del self.turns[:2]
                    self.note("the conversation is too long; its oldest question is forgotten")
        except KeyboardInterrupt:
            self.note("[stopped]")
        finally:
            if pieces:
                self.turns.append(Message("assistant", "".join(pieces)))
            else:
                self.turns.pop()

    def _hear(self, pieces: list[str]) -> None:
        system = [Message("system", self.system)] if self.system else []
        events = self.client.stream([*system, *self.turns], self.options)
        with contextlib.closing(events):
            for event in whole_lines(events, self.console):
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    render.print_delta(self.console, event, self.show_drafts)
                elif isinstance(event, Finished):
                    self.finished = event
                    self.console.print()
                    if event.reason is FinishReason.LENGTH:
                        self.note(f"[cut at {event.usage.delivered} tokens]")

    def command(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        name, _, rest = line.partition(" ")
        match name:
            case "/new":
                self.turns.clear()
            case "/system":
                self.system = rest.strip()
            case "/temperature":
                try:
                    self.options = replace(self.options, temperature=float(rest))
                except ValueError:
                    self.note(f'"{rest}" is no number')
            case "/undo" if self.turns:
                del self.turns[-2:]
            case "/undo":
                self.note("nothing has been said yet")
            case "/stats" if self.finished is not None:
                self.console.print(render.stats(self.finished))
            case "/stats":
                self.note("nothing has been answered yet")
            case _:
                self.console.print(
                    Text(HELP if name == "/help" else f"no {name}; there is\n{HELP}")
                )

    @staticmethod
    def note(text: str) -> None:
        """Something beside the conversation."""
        stderr().print(Text(text, style="dim"))


def chat(
    gateway: Gateway = GATEWAY,
    model: AskedModel = "",
    system: System = "",
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = None,
    seed: Annotated[int | None, typer.Option(min=0, help="reproduces a conversation")] = None,
    show_drafts: ShowDrafts = False,
) -> None:
    """Talk with a model; /help lists what can be said beside the questions.

    From a pipe every line is a question, and the first failure ends the chat.
    """
    by_hand = sys.stdin.isatty()
    if by_hand:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then knows arrows and history
    options = Options(model=model, temperature=temperature, max_tokens=max_tokens, seed=seed)
    with told_errors(), Client(gateway) as client:
        models = ", ".join(known.name for known in client.models())
        talk = Conversation(client, render.console(), options, system, show_drafts)
        if by_hand:
            talk.note(f"talks with {model or models or 'no model yet'}; /help, Ctrl-D ends")
        while True:
            try:
                line = input("> " if by_hand else "").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                talk.note("\nCtrl-D ends the chat")
                continue
            if line == "/exit":
                break
            if line.startswith("/"):
                talk.command(line)
            elif line:
                try:
                    talk.ask(line)
                except TandemError as error:
                    if not by_hand:
                        raise
                    tell_error(error)
