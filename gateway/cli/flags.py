"""Flags that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.asking import UINT32

GATEWAY = "127.0.0.1:7070"

Gateway = Annotated[str, typer.Option("--gateway", "-g", help="address of the gateway")]
AskedModel = Annotated[str, typer.Option("--model", help="model to ask; empty: the only one")]
System = Annotated[str, typer.Option(help="the chat's system message")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="colour tokens by their origin")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=UINT32[1],
        help="most tokens of the answer; default 256, never beyond the context",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: the likeliest token, always")]
