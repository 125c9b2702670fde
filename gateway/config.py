"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import ServiceConfig, check_address, flag
from common.errors import ConfigurationError


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """Takes client requests and joins targets and drafts."""

    name: str = field(default="gateway", init=False)
    port: int = flag(7070, "port to listen on; 0 takes a free one, printed at start")
    target: str = flag("127.0.0.1:7071", "address of the target service")
    draft: str = flag("", "address of the draft service; empty: no drafting")
    lookahead: int = flag(16, "how many uncommitted tokens a draft may be ahead; 0: no drafting")
    max_live_requests: int = flag(256, "requests served at a time; more are refused")
    default_max_tokens: int = flag(256, "output tokens of a request that does not say")
    silence_seconds: float = flag(10.0, "a peer with open sequences that says nothing is lost")
    client_stall_seconds: float = flag(30.0, "a client that reads nothing is cancelled")
    log_prompts: bool = flag(False, "log the text of prompts")

    def __post_init__(self) -> None:
        check_address(self.target, "--target")
        if self.draft:
            check_address(self.draft, "--draft")
        if self.lookahead < 0:
            raise ConfigurationError(f"is {self.lookahead}, must be 0 or more", field="--lookahead")
        for name in (
            "max_live_requests",
            "default_max_tokens",
            "silence_seconds",
            "client_stall_seconds",
        ):
            value = getattr(self, name)
            if value <= 0:
                flag_name = "--" + name.replace("_", "-")
                raise ConfigurationError(f"is {value}, must be above 0", field=flag_name)
