"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import ModelConfig, ServiceConfig, flag
from common.errors import ConfigurationError


@dataclass(frozen=True)
class DraftConfig(ModelConfig, ServiceConfig):
    """Guesses tokens ahead of the target."""

    name: str = field(default="draft", init=False)
    port: int = flag(7072, "port to listen on; 0 takes a free one, printed at start")
    drafter: str = flag(
        "ngram",
        "ngram: repeat what followed the same words before, needs no model;"
        " model: the model named by --model",
        choices=("ngram", "model"),
    )
    max_ngram: int = flag(4, "longest run of tokens that the n-gram drafter looks up")
    min_ngram: int = flag(2, "shortest run of tokens that the n-gram drafter looks up")
    max_rows: int = flag(512, "rows of one step of the model drafter")
    support: int = flag(32, "tokens in q under the rejection rule")

    def __post_init__(self) -> None:
        if self.model and self.drafter != "model":
            raise ConfigurationError("needs --drafter model", field="--model")
        if self.support < 1:
            raise ConfigurationError(f"is {self.support}, must be 1 or more", field="--support")
