"""The target service with a stop watch around its forward passes: for the host's share of a step.

`--timings` names the file that gets, when the process ends, a line of JSON for each pass: when it
began and ended, and its rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from common.config import flag, parse, prepare_process
from target_service.config import TargetConfig


@dataclass(frozen=True)
class TimedConfig(TargetConfig):
    """A target whose passes are timed."""

    timings: str = flag("", "file that gets the times when the process ends")


class TimedModel:
    """A model as it is, and when its passes ran."""

    def __init__(self, model: Any, passes: list[tuple[float, float, int]]) -> None:
        self._model = model
        self._passes = passes

    def forward(self, batch: Any) -> Any:
        """See `LanguageModel`."""
        began = time.perf_counter()
        logits = self._model.forward(batch)
        self._passes.append((began, time.perf_counter(), len(batch.token_ids)))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def main() -> None:
    """Run the target until it is told to stop."""
    config = parse(TimedConfig)
    prepare_process(config.cores, config.threads)
    from common import telemetry  # after the above: imports torch
    from common.engine.loader import load
    from common.service import run
    from target_service import servicer

    passes: list[tuple[float, float, int]] = []

    def timed(config: TimedConfig) -> Any:
        loaded = load(config)
        model: Any = TimedModel(loaded.model, passes)
        return dataclasses.replace(loaded, model=model)

    tracing = telemetry.from_environment(config.name, os.environ)
    try:
        with mock.patch.object(servicer, "load", timed):
            run(config, servicer.SERVICE_NAMES, partial(servicer.start, config, tracing), tracing)
    finally:
        Path(config.timings).write_text("".join(f"{json.dumps(p)}\n" for p in passes))


if __name__ == "__main__":
    main()
