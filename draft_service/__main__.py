"""`python -m draft_service`: see `--help`."""

import os
from functools import partial

from common import telemetry
from common.config import parse, prepare_process
from common.service import run
from common.types import ModelInfo
from draft_service import servicer
from draft_service.config import DraftConfig
from draft_service.drafters import Drafter
from draft_service.drafters.ngram import NgramDrafter


def main() -> None:
    """Run the draft until it is told to stop."""
    config = parse(DraftConfig, environ=os.environ)
    prepare_process(config.cores, config.threads, config.named("cores"))
    make = {"ngram": make_ngram, "model": make_model}[config.drafter]
    tracing = telemetry.from_environment(config.name, os.environ)
    start = partial(servicer.start, config, partial(make, config), tracing)
    run(config, servicer.SERVICE_NAMES, start, tracing)


def make_ngram(config: DraftConfig) -> tuple[Drafter, ModelInfo]:
    """A drafter without a model; fits any target."""
    return NgramDrafter(config.min_ngram, config.max_ngram), ModelInfo(name="ngram")


def make_model(config: DraftConfig) -> tuple[Drafter, ModelInfo]:
    """A drafter with a model of its own."""
    from common.engine.block_manager import BlockManager  # imports torch
    from common.engine.loader import load
    from draft_service.drafters.model import ModelDrafter

    loaded = load(config)
    blocks = BlockManager(
        loaded.num_blocks, loaded.info.block_size, prefix_cache=config.prefix_cache
    )
    drafter = ModelDrafter(
        loaded.model,
        blocks,
        eos_token_ids=loaded.info.eos_token_ids,
        max_rows=config.max_rows,
        support=config.support,
        noise=loaded.noise,
    )
    return drafter, loaded.info


if __name__ == "__main__":
    main()
