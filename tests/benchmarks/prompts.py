"""What the benchmarks ask. Committed before anything was measured; chosen for no contender.

Chats are about 40 tokens with the model's chat template, long prompts are plain text of an exact
length, edits are a text of about 200 words that is to be written out again with a small change.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

from common import tokenizer
from common.tokenizer import Tokenizer
from tests.benchmarks.texts import EDITS, TEXTS
from tests.integration.stacks import PROMPTS, packaged_model

TOPICS = (
    "a lighthouse", "the tides", "a bakery", "railways", "the moon", "bees", "an old clock",
    "a river", "chess", "glass", "a market", "the desert", "salt", "a violin", "snow", "maps",
    "a garden", "the postal service", "volcanoes", "a small town",
)  # fmt: skip
ASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List ten facts about {}.",
    "Write a letter in which somebody describes {}.",
    "Write a poem about {}.",
    "Give a lecture on {} in three paragraphs.",
    "Invent a dialogue between two people about {}.",
    "What should a visitor know about {}?",
    "Compare {} with the sea.",
    "Write ten questions and answers about {}.",
)


@functools.cache
def speaker() -> Tokenizer:
    """The packaged model's tokenizer."""
    return Tokenizer(tokenizer.read_files(Path(packaged_model())))


def chat(content: str) -> list[int]:
    """A user's message in the model's chat template."""
    return list(speaker().render_chat([{"role": "user", "content": content}]))


def chats(num: int) -> list[list[int]]:
    """So many different chats of about 40 tokens, always the same ones."""
    rounds = -(-num // len(PROMPTS))
    asked = [f"{p} ({i})" if i else p for i in range(rounds) for p in PROMPTS]
    return [chat(content) for content in asked[:num]]


def essays(num: int) -> list[list[int]]:
    """Up to 200 different requests for longer texts."""
    asked = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    return [chat(content) for content in asked[:num]]


def long(num: int, length: int) -> list[list[int]]:
    """So many different prompts of exactly so many tokens: the texts' sentences, shuffled."""
    sentences = [s.strip() + "." for text in TEXTS for s in text.split(".") if s.strip()]
    found = []
    for seed in range(num):
        dice, ids = random.Random(seed), list[int]()
        while len(ids) < length:
            some = dice.sample(sentences, len(sentences))
            ids += speaker().encode(" ".join(some) + "\n\n")
        found.append(ids[:length])
    return found


def of_length(num: int, length: int) -> list[list[int]]:
    """Prompts of about so many tokens: chats up to 40, else long ones."""
    return chats(num) if length <= 40 else long(num, length)


def edits() -> list[list[int]]:
    """Requests to write out a text with a small change."""
    return [chat(content) for content in EDITS]
