"""Texts that break naive streaming, through the packaged model's own tokenizer."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tokenizer import Tokenizer, read_files
from common.types import FinishReason, Verdict
from gateway.text import TextStream
from tests.gateway.test_text import reference
from tests.integration.stacks import packaged_model

TEXTS = {
    "emoji": "Smile 😀, wave 👋🏽, flag 🇩🇪!",
    "joined emoji": "👩‍👩‍👧‍👦 and 🏳️‍🌈 and ❤️‍🔥",
    "Chinese": "天空为什么是蓝色的。因为散射、光。",
    "Japanese": "空はなぜ青いのですか。ガギグ",
    "Korean": "하늘은 왜 파란가요? 각",
    "combining marks": "e\u0301a\u0308o\u0302 Z\u0335\u0321\u0327a\u0310l\u034eg\u0321o\u0315",
    "Arabic": "لماذا السماء زرقاء؟ 123 ABC",
    "Hebrew": "שָׁלוֹם עוֹלָם (hello)",
    "Hindi": "नमस्ते दुनिया क्ष",
    "Thai": "ทำไมท้องฟ้าเป็นสีฟ้า",
    "marks of direction": "a\u202eb\u202cc\u200fd\u2066e\u2069",
    "odd spaces": "\ta \u00a0b\u2009c\u200bd\r\n\n  e\ufeff ",
    "beyond the first plane": "𐍈𐌰 𠜎𠜱 𓀀",
    "replacement characters": "a\ufffd\ufffd b\ufffd",
    "code": "def f(x):\n\treturn {'é': x[0] ** 2}  # ∑\n",
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(read_files(Path(packaged_model())))


def run(
    parts: list[tuple[int, ...]],
    stops: tuple[str, ...] = (),
    reason: FinishReason = FinishReason.LENGTH,
    prompt: tuple[int, ...] = (),
) -> tuple[str, str | None]:
    """The text and the stop string of ids that come in these parts, each a verdict."""
    stream = TextStream(tokenizer(), prompt, stops)
    text = ""
    for i, ids in enumerate(parts):
        last = reason if i == len(parts) - 1 else None
        delta = stream.take(Verdict(0, 0, 0, 0, ids, finish_reason=last))
        assert (delta.text_ends or (0,))[-1] == len(delta.text)
        text += delta.text
        if stream.stop is not None:
            break
    return text, stream.stop


@pytest.mark.parametrize("name", TEXTS)
def test_every_cut_into_verdicts_gives_the_same_text(name: str) -> None:
    text = TEXTS[name]
    prompt, ids = tokenizer().encode("Say it:"), tokenizer().encode(text)
    assert tokenizer().decode(ids) == text
    assert run([(i,) for i in ids], prompt=prompt)[0] == text
    for a, b in itertools.combinations_with_replacement(range(len(ids)), 2):
        assert run([ids[:a], ids[a:b], ids[b:]], prompt=prompt)[0] == text


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_shown_as_soon_as_its_last_character_is_whole(name: str) -> None:
    ids = tokenizer().encode(TEXTS[name])
    stream = TextStream(tokenizer(), (), ())
    shown = ""
    num_whole = 0
    for num, token_id in enumerate(ids, 1):
        shown += stream.take(Verdict(0, 0, 0, 0, (token_id,))).text
        assert TEXTS[name].startswith(shown)
        decoded = tokenizer().decode(ids[:num])
        if not decoded.endswith("\ufffd"):
            num_whole += 1
            assert shown == decoded
    assert num_whole > 0


@given(
    text=st.text(st.sampled_from("".join(TEXTS.values())), max_size=16),
    stops=st.lists(
        st.text(st.sampled_from("ab 😀é\u0301\u200dの"), min_size=1, max_size=3), max_size=2
    ),
    data=st.data(),
)
def test_any_mixture_cut_anywhere(text: str, stops: list[str], data: st.DataObject) -> None:
    ids = tokenizer().encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, max(0, len(ids) - 1)), max_size=5)))
    parts = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    whole = tokenizer().decode(ids)
    assert run(parts, tuple(stops)) == reference(whole, stops)


STOPPED: list[tuple[str, str, str, str | None]] = [
    ("inside a run", "Hello there, world. Bye", "there", "there"),
    ("over two tokens", "Hello there, world. Bye", "re, w", "re, w"),
    ("at the very end", "Hello there", "here", "here"),
    ("the whole text", "Hello", "Hello", "Hello"),
    ("within an emoji's joints", "a👩‍👩‍👧b", "\u200d👧", "\u200d👧"),
    ("a combining mark alone", "cafe\u0301 noir", "\u0301", "\u0301"),
    ("from right to left", "שלום עולם", "ם ע", "ם ע"),
    ("a near miss", "Hello there", "there is", None),
    ("a near miss at the end", "Hello there", "ere!", None),
    ("a near miss within", "ababac", "abad", None),
]


@pytest.mark.parametrize(
    ("text", "stop", "found"), [row[1:] for row in STOPPED], ids=[row[0] for row in STOPPED]
)
def test_a_stop_string_is_found_wherever_verdicts_are_cut(
    text: str, stop: str, found: str | None
) -> None:
    ids = tokenizer().encode(text)
    expected = (text.partition(stop)[0] if found else text, found)
    for cut in range(len(ids)):
        assert run([ids[:cut], ids[cut:]], (stop,)) == expected
    assert run([(i,) for i in ids], (stop,)) == expected


def test_special_tokens_in_the_middle_are_no_text() -> None:
    t = tokenizer()
    begin, end = t.encode("<|im_start|>")[0], t.encode("<|im_end|>")[0]
    assert [t.name(i) for i in (begin, end)] == ["<|im_start|>", "<|im_end|>"]
    ids = (*t.encode("one"), end, begin, *t.encode(" two😀"), begin, *t.encode(" three"), end)
    for cut in range(len(ids)):
        parts = [ids[:cut], ids[cut:]]
        assert run(parts) == ("one two😀 three", None)
        # Since it has no text, a stop string may lie around it.
        assert run(parts, ("e two",)) == ("on", "e two")


def test_a_special_token_within_a_character_breaks_it_as_decoding_does() -> None:
    t = tokenizer()
    end = t.encode("<|im_end|>")[0]
    smile = t.encode("🏽")
    assert len(smile) > 1
    ids = (smile[0], end, *smile[1:])
    assert run([(i,) for i in ids])[0] == t.decode(ids)


def test_a_text_that_ends_within_a_character_ends_as_decoding_shows_it() -> None:
    for text in ("a🏽", "天", "e\u0310"):
        ids = tokenizer().encode(text)
        for num in range(1, len(ids) + 1):
            assert run([(i,) for i in ids[:num]])[0] == tokenizer().decode(ids[:num])
