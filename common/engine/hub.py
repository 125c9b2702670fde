"""A model from the hub, perhaps with a token, which no message may quote."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import ConfigurationError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]


def download(repo: str, token_file: str = "") -> Path:
    """The folder of a model, fetched where it is not in the hub's cache yet.

    token_file: see `read_token`. Raises `ConfigurationError` if it can't be had.
    """
    from huggingface_hub import snapshot_download

    token = read_token(token_file)
    try:
        return Path(snapshot_download(repo, allow_patterns=_FILES, token=token))
    except Exception as error:  # the library raises whatever its transport raises
        raise ConfigurationError(
            f"{repo} is no folder here and could not be had from the hub; name a folder, a .gguf"
            f" file or a hub id, with --hub-token-file if it needs one ({_first_line(error)})",
            field="--model",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def read_token(path: str) -> str | None:
    """The token that a file holds; None if no file is named."""
    if not path:
        return None
    try:
        token = Path(path).expanduser().read_text()
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be read ({error.strerror})", field="--hub-token-file"
        ) from error
    except UnicodeDecodeError:
        token = ""
    # Anything else could come back in a message of the transport.
    if not re.fullmatch(r"[!-~]+", token.strip()):
        raise ConfigurationError(
            f"{path} must hold a token and nothing else", field="--hub-token-file"
        )
    return token.strip()
