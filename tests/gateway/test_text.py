"""Detokenising and stop strings, however tokens and text are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from common.tokenizer import Tokenizer
from common.types import FinishReason, Verdict
from gateway.text import Detokenizer, StopStrings, TextStream
from tests.gateway.fakes import EOS, TOKENIZER, VOCAB_SIZE


def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece makes them: words begin with a space, rare characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁the", "a", "▁a", "日", "\ufffd"]
    backend = Backend(models.Unigram([(p, -1.0) for p in pieces], 0, byte_fallback=True))
    backend.add_special_tokens([AddedToken(p) for p in pieces[:3]])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer({"tokenizer.json": backend.to_str().encode()})


SENTENCEPIECE = byte_fallback_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join([detokenizer.add(i) for i in output] + [detokenizer.finish()])


@given(prompt=TEXTS, output=TEXTS)
@example(prompt="", output="👩‍👩‍👧 日本語 e\u0301 \ufffd नमस्ते")
@example(prompt="ends in \ufffd", output="\ufffd\ufffd begins so")
def test_streamed_text_is_the_text(prompt: str, output: str) -> None:
    ids = TOKENIZER.encode(output)
    assert streamed(TOKENIZER, TOKENIZER.encode(prompt), ids) == TOKENIZER.decode(ids)
    # Text that spells a special token has been turned into one.
    if "<s>" not in output and "</s>" not in output:
        assert TOKENIZER.decode(ids) == output


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
)
def test_streamed_ids_are_what_decoding_gives_even_if_they_are_no_text(
    prompt: list[int], output: list[int]
) -> None:
    assert streamed(TOKENIZER, prompt, output) == TOKENIZER.decode(output)


SENTENCEPIECE_IDS = st.lists(
    st.one_of(st.integers(0, 2), st.integers(259, 264), st.integers(3, 258)), max_size=14
)


@given(prompt=SENTENCEPIECE_IDS, output=SENTENCEPIECE_IDS)
def test_byte_fallback_streams_what_decoding_gives(prompt: list[int], output: list[int]) -> None:
    text = streamed(SENTENCEPIECE, prompt, output)
    decode = SENTENCEPIECE.decode
    assert text in (decode(output), decode(prompt + output)[len(decode(prompt)) :])


def test_output_keeps_the_space_that_parts_it_from_the_prompt() -> None:
    the, a = 260, 262
    assert SENTENCEPIECE.decode([the]) == "the"
    assert streamed(SENTENCEPIECE, [a], [the, a]) == " the a"


def test_a_character_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER, ())
    assert [detokenizer.add(i) for i in TOKENIZER.encode("é😀")] == ["", "é", "", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_half_a_character_ends_as_decoding_shows_it() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    assert streamed(TOKENIZER, (), ids) == TOKENIZER.decode(ids) == "a\ufffd"


@pytest.mark.parametrize(
    ("pieces", "strings", "text", "found"),
    [
        (["hello"], [], "hello", None),
        (["he", "llo"], ["l"], "he", "l"),
        (["ab", "ab", "ac"], ["abac"], "ab", "abac"),
        (["aaa", "b"], ["aab"], "a", "aab"),
        (["abcd"], ["bc", "abcd"], "a", "bc"),  # complete first
        (["xabc"], ["bc", "abc"], "x", "abc"),  # complete together: the longer
        (["ab", "x"], ["abc"], "abx", None),  # a near miss
        (["ab"], ["abc"], "ab", None),  # released at the end
    ],
)
def test_stop_strings(pieces: list[str], strings: list[str], text: str, found: str | None) -> None:
    stops = StopStrings(strings)
    out = "".join(stops.feed(piece) for piece in pieces if stops.found is None) + stops.finish()
    assert (out, stops.found) == (text, found)


def reference(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The definition, on the whole text."""
    ends = sorted(
        (at + len(s), at, s) for s in strings for at in range(len(text)) if text.startswith(s, at)
    )
    return (text[: ends[0][1]], ends[0][2]) if ends else (text, None)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=6),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], strings: list[str]) -> None:
    stops = StopStrings(strings)
    out = ""
    for piece in pieces:
        if stops.found is None:
            out += stops.feed(piece)
            certain = reference("".join(pieces), strings)[0]
            assert certain.startswith(out)
    assert (out + stops.finish(), stops.found) == reference("".join(pieces), strings)


@given(text=TEXTS, data=st.data(), strings=st.lists(st.text("ab é", min_size=1), max_size=2))
def test_text_ends_add_up(text: str, data: st.DataObject, strings: list[str]) -> None:
    ids = (*TOKENIZER.encode(text), EOS)
    cut = data.draw(st.integers(0, len(ids) - 1))
    stream = TextStream(TOKENIZER, (), strings)
    deltas = [stream.take(Verdict(0, 0, 0, 0, ids[:cut]))]
    if stream.stop is None:
        last = Verdict(0, cut, 0, 0, ids[cut:], finish_reason=FinishReason.STOP_TOKEN)
        deltas.append(stream.take(last))
    for delta in deltas:
        assert len(delta.text_ends) == len(delta.token_ids) == len(delta.origins)
        assert list(delta.text_ends) == sorted(delta.text_ends)
        assert (delta.text_ends or (0,))[-1] == len(delta.text)
    assert stream.num_delivered == sum(len(delta.token_ids) for delta in deltas)
    whole = "".join(delta.text for delta in deltas)
    assert (whole, stream.stop) == reference(TOKENIZER.decode(ids), strings)
