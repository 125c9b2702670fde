"""`tandem demo`: a real model answers through three processes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from gateway.cli import render
from gateway.cli.processes import LocalStack, StackError
from gateway.cli.viewing import Viewer
from gateway.client import Client, Delta, Finished, Message, Options, Started
from gateway.tracing import Receiver, Store
from gateway.tracing.words import from_target

TRACE_SECONDS = 15.0

# Answers repeat their own words often, but never for long: on any machine, however it rounds,
# many draft tokens are accepted and some are not.
QUESTIONS = (
    (
        "greedy",
        "Write a Python function for each of: add, subtract, multiply, divide.",
        Options(temperature=0.0, max_tokens=96),
    ),
    (
        "sampled",
        "Write a Python class for a bank account with deposit, withdraw and balance methods.",
        Options(temperature=0.7, seed=1, max_tokens=112),
    ),
)


def run(model: str, dtype: str, html: Path) -> None:
    """Run the demo, ending with the picture of its last request.

    Raises `StackError` if drafting made no difference, or the picture's spans do not come.
    """
    console = render.console()
    console.print("starting target, draft and gateway ...")
    rows: list[tuple[str, Finished]] = []
    store, request_id = Store(), ""
    with (
        Receiver(store, "127.0.0.1:0") as receiver,
        LocalStack(model=model, draft="ngram", dtype=dtype, env=receiver.environment) as stack,
        Client(stack.gateway_address) as client,
    ):
        console.print(render.status(client.status()))
        if console.is_terminal:
            console.print(Text("\ncolours: ") + render.LEGEND)
        for name, question, options in QUESTIONS:
            console.print(Text(f"\n> {question}", style="bold"))
            request_id, finished = _answer(client, console, question, options)
            rows.append((name, finished))
        assert stack.target is not None
        viewer = Viewer(store, console, from_target(stack.target.address), html)
        traced = viewer.wait_for(request_id, TRACE_SECONDS)
    console.print()
    console.print(render.figures(rows))
    if traced is None:
        raise StackError("the trace of the demo's last request has not come")
    console.print("\nthe last one, round trip by round trip:\n")
    viewer.show(traced)
    num_accepted = sum(finished.speculation.accepted for _, finished in rows)
    num_tested = sum(finished.speculation.tested for _, finished in rows)
    if num_accepted == 0:
        raise StackError("the demo is of no use: no draft token was accepted")
    if num_accepted == num_tested:
        raise StackError("the demo is of no use: no draft token was rejected")


def _answer(
    client: Client, console: Console, question: str, options: Options
) -> tuple[str, Finished]:
    """The request's id, and how it ended."""
    request_id = ""
    for event in client.stream([Message("user", question)], options):
        if isinstance(event, Started):
            request_id = event.request_id
        elif isinstance(event, Delta):
            render.print_piece(console, render.coloured(event))
        elif isinstance(event, Finished):
            console.print()
            return request_id, event
    raise StackError("the answer has no end")
