"""The text of tokens: spans carry ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from tandem.v1 import target_pb2, target_pb2_grpc

from common.errors import error_from_rpc
from common.service import CHANNEL_OPTIONS
from common.tokenizer import Tokenizer, read_files
from gateway.tracing.model import Request, Round

REPLACEMENT = "\ufffd"
NUM_BEFORE = 8  # so many ids before a token tell whether it begins with a space
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RoundText:
    """The texts of one round's tokens."""

    tokens: tuple[str, ...]
    rejected: tuple[str, ...]


class Words:
    """Turns ids into text, or into `#id` without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def of(self, request: Request) -> tuple[RoundText, ...]:
        """The texts of all rounds, in order."""
        before: list[int] = []
        texts = []
        for r in request.rounds:
            texts.append(self._round(r, before))
            before += [token.token_id for token in r.tokens]
        return tuple(texts)

    def _round(self, r: Round, before: Sequence[int]) -> RoundText:
        ids = [token.token_id for token in r.tokens]
        run = [*before[-NUM_BEFORE:], *ids]
        num_before = len(run) - len(ids)
        tokens = tuple(self.text(run[: num_before + i], ids[i]) for i in range(len(ids)))
        guessed = run[: num_before + r.num_accepted]
        rejected = []
        for token_id in r.rejected:
            if token_id is None:
                rejected.append("?")
                continue
            rejected.append(self.text(guessed, token_id))
            guessed.append(token_id)
        return RoundText(tokens, tuple(rejected))

    def text(self, before: Sequence[int], token_id: int) -> str:
        """What a token adds to those before it; its name if that is nothing."""
        if self._tokenizer is None:
            return f"#{token_id}"
        tail = list(before[-NUM_BEFORE:])
        so_far = self._tokenizer.decode(tail).rstrip(REPLACEMENT)
        whole = self._tokenizer.decode([*tail, token_id])
        piece = whole[len(so_far) :] if whole.startswith(so_far) else ""
        if piece:
            return REPLACEMENT if piece.endswith(REPLACEMENT) else piece
        return self._tokenizer.name(token_id) or f"#{token_id}"


def from_folder(folder: Path) -> Words:
    """With the tokenizer of a model folder; raises `ConfigurationError` if there is none."""
    return Words(Tokenizer(read_files(folder)))


def from_target(address: str) -> Words:
    """With the tokenizer that a target hands out; raises `TandemError` if it can't be had."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            answer = stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return Words(Tokenizer(dict(answer.files)))
