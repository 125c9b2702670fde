"""`tandem generate`: ask once and print what comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from common.errors import InvalidRequestError
from common.types import MAX_LOGPROBS, FinishReason, Rule
from gateway.asking import INT32, UINT32, UINT64
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
from gateway.cli.telling import stderr, told_errors, whole_lines
from gateway.client import Client, Delta, Event, Finished, Message, Options, Started
from gateway.types import MAX_CHOICES


class RuleName(StrEnum):
    """Names of the rules on the command line."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    COUPLED = "coupled"


def generate(
    prompt: Annotated[str, typer.Argument(help="what to answer, or to continue with --raw")],
    gateway: Gateway = GATEWAY,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, without a chat")] = False,
    system: System = "",
    show_drafts: ShowDrafts = False,
    stats: Annotated[bool, typer.Option("--stats", help="print the figures at the end")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="say at the end what bounded the request")
    ] = False,
    model: AskedModel = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, max=UINT32[1], help="of the k likeliest tokens only; 0: all")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="of the likeliest with this mass only")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="none below this part of the likeliest")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="divides the logits of tokens seen; 1: off")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(min=-2.0, max=2.0, help="off the logits of tokens generated")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(min=-2.0, max=2.0, help="the same, for each time one was generated")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="added to a token's logit; repeatable"),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, max=UINT32[1], help="so many come before the end")
    ] = 0,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_LOGPROBS, help="log probabilities of each token and so many likeliest"
        ),
    ] = None,
    n: Annotated[
        int, typer.Option("--n", min=1, max=MAX_CHOICES, help="texts, printed once all are there")
    ] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="ends the text; repeatable")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(min=0, max=UINT32[1], help="ends the text; repeatable")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=UINT64[1], help="reproduces an answer")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="run on over the end")] = False,
    rule: Annotated[RuleName | None, typer.Option(help="how draft tokens are tested")] = None,
    lookahead: Annotated[
        int | None, typer.Option(min=0, max=UINT32[1], help="how far drafts may be ahead")
    ] = None,
    speculate: Annotated[bool, typer.Option(help="whether to use drafts")] = True,
    priority: Annotated[
        int, typer.Option(min=INT32[0], max=INT32[1], help="higher goes first")
    ] = 0,
    cache_salt: Annotated[
        str, typer.Option(help="share cached prefixes only with requests of the same salt")
    ] = "",
    timeout: Annotated[float | None, typer.Option(help="seconds until it is given up")] = None,
) -> None:
    """Ask a running gateway and stream the answer."""
    with told_errors(), Client(gateway) as client:
        options = Options(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_biases(logit_bias or ()),
            min_tokens=min_tokens,
            logprobs=logprobs,
            n=n,
            stop=stop or (),
            stop_token_ids=tuple(stop_token_id or ()),
            seed=seed,
            ignore_eos=ignore_eos,
            rule=Rule[rule.name] if rule else None,
            lookahead=lookahead,
            speculate=speculate,
            priority=priority,
            cache_salt=cache_salt,
            explain=explain,
            timeout=timeout,
        )
        turns: Any = prompt
        if not raw:
            turns = [Message("system", system)] if system else []
            turns.append(Message("user", prompt))
        console = render.console()
        events: Iterable[Event] = client.stream(turns, options)
        if n == 1:
            events = _streamed(whole_lines(events, console), console, show_drafts)
        _tell(list(events), console, n, show_drafts, stats)


def _biases(entries: Iterable[str]) -> dict[int, float]:
    biases = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidRequestError(
                f'is "{entry}", must be ID=BIAS, such as 42=-1.5', field="sampling.logit_bias"
            ) from None
    return biases


def _streamed(events: Iterable[Event], console: Console, show_drafts: bool) -> Iterator[Event]:
    """The events; text is printed as it passes."""
    for event in events:
        if isinstance(event, Delta):
            render.print_delta(console, event, show_drafts)
        elif isinstance(event, Finished):
            console.print()
        yield event


def _tell(events: list[Event], console: Console, n: int, show_drafts: bool, stats: bool) -> None:
    """What is to be said once all is there, choice by choice."""
    (started,) = (event for event in events if isinstance(event, Started))
    ends = {event.index: event for event in events if isinstance(event, Finished)}
    for index, finished in sorted(ends.items()):
        deltas = [event for event in events if isinstance(event, Delta) and event.index == index]
        if n > 1:
            console.print(Text(f"[{index}]", style="bold"))
            for delta in deltas:
                render.print_delta(console, delta, show_drafts)
            console.print()
        if finished.reason is FinishReason.LENGTH:
            note = f"[cut at {finished.usage.delivered} tokens; see --max-tokens]"
            stderr().print(Text(note, style="dim"))
        if any(delta.logprobs for delta in deltas):
            console.print(render.logprobs(deltas))
        if stats:
            console.print(f"\nseed {started.seed}, {started.rule.name.lower()}, {started.model}")
            console.print(f"request {started.request_id}" + (f"/{index}" if index else ""))
            console.print(render.stats(finished))
        if finished.explanation is not None:
            console.print()
            console.print(render.explanation(finished.explanation))
