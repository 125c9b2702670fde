"""`python -m common.engine.native`: compile now, so that the first start need not."""

from common.config import ModelConfig
from common.engine.native.build import attention_library, library

for name, make in (("native step", library), ("native attention", attention_library)):
    _, reason = make(ModelConfig().cache_dir)
    print(f"{name}: {reason or 'ready'}")  # noqa: T201
