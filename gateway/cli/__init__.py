"""`tandem`: run a stack on this machine, ask it, look at it."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it when it is imported

from gateway.cli.commands import app

__all__ = ["app"]
