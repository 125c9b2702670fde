"""`python -m common.engine.native`: compile now, so that the first start need not.

With `--prebuild`, for images: into the installed package instead of this user's cache.
"""

import sys

from common.config import ModelConfig
from common.engine.native.build import library, prebuild

if sys.argv[1:] == ["--prebuild"]:
    print(f"native step: {prebuild()}")  # noqa: T201
else:
    _, reason = library(ModelConfig().cache_dir)
    print(f"native step: {reason or 'ready'}")  # noqa: T201
