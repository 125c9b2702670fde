"""The tokenizer of a model, out of its files and without torch.

The target hands the files out (`GetTokenizer`), so that a gateway needs no model folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers.decoders import DecodeStream

from common.chat_template import ChatTemplate
from common.errors import ConfigurationError, InvalidRequestError
from common.types import Tokens

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def read_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a model folder, as many as there are, by name.

    Raises `ConfigurationError` if tokenizer.json is not among them.
    """
    files = {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise ConfigurationError(f"{folder} holds no tokenizer.json; save a fast tokenizer there")
    return files


def fingerprint(files: Mapping[str, bytes]) -> str:
    """Equal iff every token id stands for the same token, added tokens included."""
    return Tokenizer(files).fingerprint


class Tokenizer:
    """Text to ids and back, and the chat template.

    Raises `ConfigurationError` if the files can't be read.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            settings = _settings(files)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ConfigurationError(f"the tokenizer's files can't be read: {error}") from error
        # Files may carry the settings of some training run; a prompt is never cut or filled.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = _chat_template(files, settings)
        self._special_tokens = _special_tokens(settings)

    @cached_property
    def fingerprint(self) -> str:
        """Equal iff every token id stands for the same token."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        pairs = sorted((token_id, token) for token, token_id in vocab.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:32]

    @property
    def num_ids(self) -> int:
        """How many token ids there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def ids_held(self) -> frozenset[int]:
        """Ids whose text is open until another one follows.

        Byte-fallback decoders turn a whole run of byte tokens into replacement characters
        if it is not valid UTF-8 in the end; skipped special tokens don't end such a run.
        """
        byte_ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        added = self._backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special_ids | {i for i in byte_ids if i is not None})

    def encode(self, text: str) -> Tokens:
        """The ids of a text, with special tokens as the tokenizer adds them."""
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def render_chat(self, messages: Iterable[Mapping[str, str]]) -> Tokens:
        """The ids of a conversation (role and content), up to where the assistant answers.

        Raises `InvalidRequestError` if there is no chat template or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; send text instead", field="chat"
            )
        try:
            text = self._compiled.render(messages, self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"is refused by the model's chat template: {error}", field="chat"
            ) from error
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _compiled(self) -> ChatTemplate:
        assert self._template is not None
        return ChatTemplate(self._template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; special tokens have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def name(self, token_id: int) -> str:
        """What the vocabulary calls an id, such as `<|im_end|>`; empty if it has none."""
        return self._backend.id_to_token(token_id) or ""

    def stream(self, token_ids: Sequence[int]) -> DecodeStream:
        """An incremental decoder of what follows token_ids."""
        return DecodeStream(ids=list(token_ids), skip_special_tokens=True)

    def step(self, stream: DecodeStream, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids; raises if the decoder loses track."""
        return stream.step(self._backend, list(token_ids)) or ""


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            merged |= json.loads(files[name])
    return merged


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token and the like, which templates refer to."""
    special: dict[str, Any] = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                special[name] = content
    return special


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
