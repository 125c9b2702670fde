"""`tandem demo`: a real model answers through three processes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from gateway.cli import render
from gateway.cli.processes import LocalStack, StackError
from gateway.client import Client, Delta, Finished, Message, Options

QUESTIONS = (
    (
        "greedy",
        "Write a Python function that adds two numbers, then one that subtracts them,"
        " then one that multiplies them.",
        Options(temperature=0.0, max_tokens=96),
    ),
    (
        "sampled",
        "Write a short Python class for a stack with push, pop and peek methods.",
        Options(temperature=0.7, seed=1, max_tokens=128),
    ),
)


def run(model: str, dtype: str) -> None:
    """Run the demo; raises `StackError` if drafting made no difference."""
    console = render.console()
    console.print("starting target, draft and gateway ...")
    rows: list[tuple[str, Finished]] = []
    stack = LocalStack(model=model, draft="ngram", dtype=dtype)
    with stack, Client(stack.gateway_address) as client:
        console.print(render.status(client.status()))
        console.print(Text("\ncolours: ") + render.LEGEND)
        for name, question, options in QUESTIONS:
            console.print(Text(f"\n> {question}", style="bold"))
            rows.append((name, _answer(client, console, question, options)))
    console.print()
    console.print(render.figures(rows))
    num_accepted = sum(finished.speculation.accepted for _, finished in rows)
    num_tested = sum(finished.speculation.tested for _, finished in rows)
    if num_accepted == 0:
        raise StackError("the demo is of no use: no draft token was accepted")
    if num_accepted == num_tested:
        raise StackError("the demo is of no use: no draft token was rejected")


def _answer(client: Client, console: Console, question: str, options: Options) -> Finished:
    for event in client.stream([Message("user", question)], options):
        if isinstance(event, Delta):
            render.print_piece(console, render.coloured(event))
        elif isinstance(event, Finished):
            console.print()
            return event
    raise StackError("the answer has no end")
