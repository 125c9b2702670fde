"""`python -m common.engine.native`: compile now, so that the first start need not.

With `--prebuild`, for images: into the installed package instead of this user's cache.
"""

import sys

from common.config import ModelConfig
from common.engine.native.build import attention_library, library, prebuild

if sys.argv[1:] == ["--prebuild"]:
    for path in prebuild():
        print(f"compiled: {path}")  # noqa: T201
else:
    for name, make in (("native step", library), ("native attention", attention_library)):
        _, reason = make(ModelConfig().cache_dir)
        print(f"{name}: {reason or 'ready'}")  # noqa: T201
