"""`python -m common.engine.native`: compile now, so that the first start need not."""

from common.config import ModelConfig
from common.engine.native.build import library

_, reason = library(ModelConfig().cache_dir)
print(f"native step: {reason or 'ready'}")  # noqa: T201
