"""`python -m target_service`: see `--help`."""

from functools import partial

from common.config import parse, prepare_process
from target_service.config import TargetConfig


def main() -> None:
    """Run the target until it is told to stop."""
    config = parse(TargetConfig)
    prepare_process(config.cores, config.threads)
    from common.service import run  # after the above: imports torch
    from target_service import servicer

    run(config, servicer.SERVICE_NAMES, partial(servicer.start, config))


if __name__ == "__main__":
    main()
