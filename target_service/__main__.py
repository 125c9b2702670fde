"""`python -m target_service`: see `--help`."""

import os
from functools import partial

from common.config import parse, prepare_process
from target_service.config import TargetConfig


def main() -> None:
    """Run the target until it is told to stop."""
    config = parse(TargetConfig, environ=os.environ)
    prepare_process(config.cores, config.threads, config.named("cores"))
    from common import telemetry  # after the above: imports torch
    from common.service import run
    from target_service import servicer

    tracing = telemetry.from_environment(config.name, os.environ)
    run(config, servicer.SERVICE_NAMES, partial(servicer.start, config, tracing), tracing)


if __name__ == "__main__":
    main()
