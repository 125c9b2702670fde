"""A look at one request: a receiver of traces, and a waterfall in the terminal and the browser."""

from gateway.tracing.model import Request
from gateway.tracing.reading import read, requests
from gateway.tracing.receiver import Receiver
from gateway.tracing.store import Store

__all__ = ["Receiver", "Request", "Store", "read", "requests"]
