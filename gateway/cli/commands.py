"""The commands of `tandem`."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

import common
from common.settings import MAX_PORT
from gateway.cli import demo as demonstration
from gateway.cli import render
from gateway.cli.chat import chat
from gateway.cli.flags import GATEWAY, Gateway
from gateway.cli.generate import generate
from gateway.cli.processes import LocalStack, check_port
from gateway.cli.telling import tell_stopping, told_errors
from gateway.cli.viewing import Viewer, parse_rounds
from gateway.client import Client
from gateway.tracing import Receiver, Store
from gateway.tracing.words import Words, from_folder, from_target

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
OTLP = "127.0.0.1:4317"
DEMO_PAGE = Path("build/demo-trace.html")

Model = Annotated[
    str, typer.Option(help="hub id, folder or .gguf file; empty: the packaged small model")
]
Draft = Annotated[str, typer.Option(help="ngram, none, or a model to draft with")]
Port = Annotated[int, typer.Option(min=0, max=MAX_PORT, help="port of the gateway; 0: a free one")]
Html = Annotated[Path | None, typer.Option(help="write the newest request as a page to this file")]


TargetArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--target-arg",
        metavar="FLAG",
        help="a flag of every target, such as --target-arg=--quantization=int8; may be repeated",
    ),
]
DraftArgs = Annotated[
    list[str] | None, typer.Option("--draft-arg", metavar="FLAG", help="the same for drafts")
]
GatewayArgs = Annotated[
    list[str] | None,
    typer.Option("--gateway-arg", metavar="FLAG", help="the same for the gateway"),
]


class DtypeName(StrEnum):
    """Number formats on the command line."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


Dtype = Annotated[DtypeName, typer.Option(help="number format of weights and KV cache")]


def _stop_on_sigterm() -> None:
    """Let SIGTERM do what Ctrl-C does, so that child processes are stopped."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tandem {common.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Speculative decoding split over a draft and a target service."""


@app.command()
def up(
    model: Model = "",
    draft: Draft = "ngram",
    dtype: Dtype = DtypeName.AUTO,
    host: Annotated[str, typer.Option(help="address the gateway listens on")] = "127.0.0.1",
    port: Port = 7070,
    lookahead: Annotated[
        int | None, typer.Option(min=0, help="how far drafts may be ahead; 0: no drafting")
    ] = None,
    target_args: TargetArgs = None,
    draft_args: DraftArgs = None,
    gateway_args: GatewayArgs = None,
    targets: Annotated[int, typer.Option(min=1, help="how many targets to run")] = 1,
    drafts: Annotated[int, typer.Option(min=1, help="how many drafts to run")] = 1,
    trace: Annotated[
        bool, typer.Option("--trace", help="list requests as they end, for a look at their time")
    ] = False,
    html: Html = None,
) -> None:
    """Run target, draft and gateway on this machine until Ctrl-C."""
    logging.basicConfig(format="tandem: %(message)s", stream=sys.stderr)
    _stop_on_sigterm()
    console = render.console()
    ahead = [] if lookahead is None else [f"--lookahead={lookahead}"]
    store = Store()
    with told_errors(), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as running:
        check_port(host, port)
        console.print("starting; a model may take a while to load")
        env: dict[str, str] = {}
        if trace or html is not None:
            env = running.enter_context(Receiver(store, "127.0.0.1:0")).environment
        stack = LocalStack(
            model=model,
            draft=draft,
            dtype=dtype,
            port=port,
            num_targets=targets,
            num_drafts=drafts,
            target_args=target_args or (),
            draft_args=draft_args or (),
            gateway_args=[f"--host={host}", *ahead, *(gateway_args or ())],
            env=env,
        )
        running.enter_context(stack)
        console.print(f'serves on {stack.gateway_address}; ask it: tandem generate "Hello"')
        try:
            if env:
                assert stack.target is not None
                words = from_target(stack.target.address)
                Viewer(store, console, words, html).live(stack.check)
            while True:
                time.sleep(0.2)
                stack.check()
        except KeyboardInterrupt:
            tell_stopping(console, stack.gateway_address)
            raise


app.command()(generate)
app.command()(chat)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="as `generate --stats` and the log tell it")],
    gateway: Gateway = GATEWAY,
) -> None:
    """Say what bounded one of a gateway's last requests, and what would change it."""
    with told_errors(), Client(gateway) as client:
        render.console().print(render.explanation(client.explain(request_id)))


@app.command()
def status(gateway: Gateway = GATEWAY) -> None:
    """Show a gateway and its peers."""
    with told_errors(), Client(gateway) as client:
        render.console().print(render.status(client.status()))


@app.command()
def trace(
    listen: Annotated[str, typer.Option(help="where services send their spans")] = OTLP,
    request: Annotated[
        str, typer.Option(help="wait for this one and show it: an id, or `last`; empty: list all")
    ] = "",
    html: Html = None,
    rounds: Annotated[str, typer.Option(help="rounds in detail, such as 20-35")] = "",
    target: Annotated[str, typer.Option(help="a target's address, for the text of tokens")] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="a folder with tokenizer.json, for the text of tokens")
    ] = None,
) -> None:
    """Receive the services' traces (OTLP/gRPC) and show where requests spent their time."""
    _stop_on_sigterm()
    console = render.console()
    store = Store()
    with told_errors(), contextlib.suppress(KeyboardInterrupt):
        words = Words()
        if tokenizer is not None:
            words = from_folder(tokenizer)
        elif target:
            words = from_target(target)
        viewer = Viewer(store, console, words, html, parse_rounds(rounds))
        with Receiver(store, listen) as receiver:
            told = f"OTEL_EXPORTER_OTLP_ENDPOINT=http://{receiver.address}"
            console.print(Text(f"listens; services send here with {told}", "dim"))
            if not request:
                viewer.live()
            found = viewer.wait_for(request)
            assert found is not None
            viewer.show(found)


@app.command()
def demo(
    model: Model = "",
    dtype: Dtype = DtypeName.AUTO,
    html: Annotated[Path, typer.Option(help="where the page of the last request goes")] = DEMO_PAGE,
) -> None:
    """Start a stack, let a model answer with n-gram drafts, show what was accepted, stop."""
    _stop_on_sigterm()
    with told_errors():
        demonstration.run(model, dtype, html)
