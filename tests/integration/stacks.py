"""Real services in real processes, for tests and benchmarks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.gateway.fakes import tokenizer_files
from tests.models import transformer

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from one to twenty in words.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "List the days of the week, then list them again.",
    "Translate to French: I would like a cup of coffee, please.",
    "Write a Python function that reverses a string.",
    "Explain why the sky is blue to a child.",
    "Who wrote Hamlet, and when?",
    "Give me five synonyms for happy.",
    "Write a short letter to a friend about a holiday.",
    "What is 17 times 23? Show the steps.",
    "Name the planets of the solar system in order.",
    "Fix the typos: 'Teh cat sta on teh mat and teh dog sta on teh rug.'",
    "Write an SQL query that counts users by country.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Write a JSON object that describes a book with title, author and year.",
    "What are the primary colours? Answer with a list.",
    "Tell me a joke about computers.",
    "Say hello in ten languages, one a line: 'language: hello'.",
)


def tiny_model(folder: Path) -> str:
    """A folder with an untrained model of a few thousand weights; steps take milliseconds."""
    transformer("llama").save_pretrained(folder)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return str(folder)


@cache
def packaged_model() -> str:
    """The folder of the packaged model, converted if this is the first time."""
    from common.config import ModelConfig
    from common.engine.loader import resolve

    return str(resolve(ModelConfig())[0])
