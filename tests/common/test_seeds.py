"""Seeds of further choices: pinned down, and all different."""

from __future__ import annotations

import pytest

from common.seeds import hash_seed

GOLDEN = [
    (17, 0, 17),
    (17, 1, 9208056383769846300),
    (17, 2, 1786386980972013327),
    (17, 31, 1042629039265398906),
    (0, 1, 627405149472732430),
    (2**64 - 1, 1, 7521888212171461645),
]


@pytest.mark.parametrize(("seed", "index", "hashed"), GOLDEN)
def test_golden_seeds(seed: int, index: int, hashed: int) -> None:
    assert hash_seed(seed, index) == hashed


def test_no_two_choices_share_a_seed() -> None:
    seeds = {hash_seed(seed, i) for seed in (17, 18) for i in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**64 for seed in seeds)
