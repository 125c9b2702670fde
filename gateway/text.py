"""From token ids to text, piece by piece: detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from common.tokenizer import Tokenizer
from common.types import FinishReason, Verdict
from gateway.types import Delta

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Streams the text that output ids add to a prompt.

    Whatever the ids, the pieces of `add` and `finish` together are what decoding prompt and
    output at once adds to the decoded prompt. A character is held back until its last byte
    is there.
    """

    NUM_PRIMING = 8
    """So many prompt ids tell whether the output begins with a space."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tail = list(prompt[-self.NUM_PRIMING :])
        before = tokenizer.decode(tail)
        if before.endswith(REPLACEMENT) or (tail and tail[-1] in tokenizer.ids_held):
            tail, before = [], ""  # the prompt ends within a character, or with no text
        self._ids = tail
        self._num_before = len(before)
        self._num_out = 0  # characters
        self._held: list[int] = []
        self._stream = tokenizer.stream(tail)

    def add(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._ids.append(token_id)
        self._held.append(token_id)
        if token_id in self._tokenizer.ids_held:
            return ""
        held, self._held = self._held, []
        try:
            text = self._tokenizer.step(self._stream, held)
        except Exception:  # bare Exceptions; a decoder that rewrites what it has said
            text = self._rest()
            self._stream = self._tokenizer.stream(self._ids)
        self._num_out += len(text)
        return text

    def finish(self) -> str:
        """What is left: incomplete characters, as the replacement characters they decode to."""
        text = self._rest()
        self._num_out += len(text)
        return text

    def _rest(self) -> str:
        return self._tokenizer.decode(self._ids)[self._num_before + self._num_out :]


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Of two that are complete at the same character, the longer one counts.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""  # may be the beginning of a stop string
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            _, begin, self.found = min(ends)
            self._held = ""
            return text[:begin]
        num_held = max((self._num_begun(text, s) for s in self._strings), default=0)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back for nothing."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _num_begun(text: str, string: str) -> int:
        longest = min(len(text), len(string) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class TextStream:
    """Turns the verdicts of one sequence into deltas, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop_strings: Sequence[str]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)
        self.num_delivered = 0  # tokens

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stops.found

    def take(self, verdict: Verdict) -> Delta:
        """The delta of a verdict; tokens after the one that completes a stop string drop out."""
        pieces: list[str] = []
        text_ends: list[int] = []
        num_out = 0
        for index, token_id in enumerate(verdict.token_ids):
            last = index == len(verdict.token_ids) - 1
            piece = ""
            # An end-of-sequence or stop token is delivered, but it is no text.
            if not (last and verdict.finish_reason is FinishReason.STOP_TOKEN):
                piece = self._stops.feed(self._detokenizer.add(token_id))
            if last and verdict.finish_reason is not None and self.stop is None:
                piece += self._stops.feed(self._detokenizer.finish())
                if self.stop is None:
                    piece += self._stops.finish()
            pieces.append(piece)
            num_out += len(piece)
            text_ends.append(num_out)
            if self.stop is not None:
                break
        num_tokens = len(text_ends)
        self.num_delivered += num_tokens
        return Delta(
            text="".join(pieces),
            token_ids=verdict.token_ids[:num_tokens],
            origins=verdict.origins()[:num_tokens],
            text_ends=tuple(text_ends),
        )
