"""The target's settings name the flag that is wrong."""

from __future__ import annotations

import pytest

from common.config import parse
from target_service.config import TargetConfig


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--watermark", "1"), ("--watermark", "-0.1"), ("--watermark", "nan"),
     ("--age-seconds", "-1"), ("--age-seconds", "inf")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SystemExit, match=f"tandem target: {flag}: is .*, must be 0"):
        parse(TargetConfig, [f"{flag}={value}"])


def test_memory_settings() -> None:
    config = parse(TargetConfig, ["--no-prefix-cache", "--watermark=0.05", "--age-seconds=0"])
    assert (config.prefix_cache, config.watermark, config.age_seconds) == (False, 0.05, 0.0)
    assert TargetConfig().prefix_cache
