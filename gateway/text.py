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
        self._begun = [_Begun(string) for string in strings]
        self._held = ""  # may be the beginning of a stop string
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + piece
        ends = [(end, -len(b.string), b.string) for b in self._begun if (end := b.read(piece))]
        if ends:
            end, _, self.found = min(ends)
            certain = len(self._held) + end - len(self.found)
            self._held = ""
            return text[:certain]
        certain = len(text) - max((b.num for b in self._begun), default=0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back for nothing."""
        text, self._held = self._held, ""
        return text


class _Begun:
    """How much of one string a text ends with, in time linear in the text.

    Source: Knuth, Morris, Pratt: Fast Pattern Matching in Strings, SIAM J. Comput. 6 (1977).
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num = 0  # characters
        # borders[k]: the most characters that string[: k + 1] both begins and ends with,
        # short of itself; made as far as they are needed.
        self._borders = [0]

    def read(self, piece: str) -> int:
        """Go on by a piece; returns how many of its characters complete the string, or 0."""
        string, num, at = self.string, self.num, 0
        while at < len(piece):
            if num == 0:
                at = piece.find(string[0], at)
                if at < 0:
                    break
            while num and piece[at] != string[num]:
                num = self._border(num)
            num += piece[at] == string[num]
            at += 1
            if num == len(string):
                return at
        self.num = num
        return 0

    def _border(self, num: int) -> int:
        string, borders = self.string, self._borders
        while len(borders) < num:
            at, k = len(borders), borders[-1]
            while k and string[at] != string[k]:
                k = borders[k - 1]
            borders.append(k + (string[at] == string[k]))
        return borders[num - 1]


class TextStream:
    """Turns the verdicts of one sequence into deltas, up to a stop string.

    prefix is output that the client already has: it makes no deltas, but what comes after it
    is as if it had been streamed here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_strings: Sequence[str],
        prefix: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)
        self._index = index  # of the choice
        self.num_delivered = 0  # tokens
        for token_id in prefix:
            self._add(token_id)

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stops.found

    def _add(self, token_id: int) -> str:
        return self._stops.feed(self._detokenizer.add(token_id))

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
                piece = self._add(token_id)
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
            index=self._index,
            logprobs=verdict.logprobs[:num_tokens],
            top_logprobs=verdict.top_logprobs[:num_tokens],
        )


def stopped_at(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_strings: Sequence[str],
) -> int | None:
    """The index of the output token that completes a stop string; None if none does."""
    if not stop_strings:
        return None
    detokenizer, stops = Detokenizer(tokenizer, prompt), StopStrings(stop_strings)
    for index, token_id in enumerate(output):
        stops.feed(detokenizer.add(token_id))
        if stops.found is not None:
            return index
    return None
