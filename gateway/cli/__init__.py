"""`tandem`: run a stack on this machine, ask it, look at it."""

from gateway.cli.commands import app

__all__ = ["app"]
