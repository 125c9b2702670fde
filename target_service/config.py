"""Settings of the target service."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import ModelConfig, ServiceConfig, flag
from common.errors import ConfigurationError


@dataclass(frozen=True)
class TargetConfig(ModelConfig, ServiceConfig):
    """Owns the paged KV cache of a model and decides tokens."""

    name: str = field(default="target", init=False)
    port: int = flag(7071, "port to listen on; 0 takes a free one, printed at start")
    max_running: int = flag(64, "sequences that take part in a step")
    max_rows: int = flag(512, "rows of one step: decoding, drafted and prompt rows together")
    objective: str = flag(
        "latency",
        "what draft tokens are tested for; latency: the least time per token; throughput: the most"
        " tokens a second; fixed: all that arrive within the lookahead",
        choices=("latency", "throughput", "fixed"),
    )
    prefill_ms: float = flag(50.0, "what prompts may add to a step in which others decode")
    max_waiting: int = flag(1024, "sequences that may wait; more are refused")
    watermark: float = flag(
        0.01,
        "part of the KV cache that admission leaves free, besides a block for each running"
        " sequence; 0: neither",
    )
    age_seconds: float = flag(
        10.0, "a waiting sequence's priority rises by one in this time; 0: never"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ConfigurationError(
                f"is {self.watermark}, must be 0 to less than 1", field="--watermark"
            )
        if not 0 <= self.age_seconds < float("inf"):
            raise ConfigurationError(
                f"is {self.age_seconds}, must be 0 or more", field="--age-seconds"
            )
