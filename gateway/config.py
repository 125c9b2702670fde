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
    target: str = flag(
        "127.0.0.1:7071", "addresses of the targets, separated by commas", listed=True
    )
    draft: str = flag(
        "", "addresses of the drafts, separated by commas; empty: no drafting", listed=True
    )
    lookahead: int = flag(16, "how many uncommitted tokens a draft may be ahead; 0: no drafting")
    max_live_requests: int = flag(256, "requests served at a time; more are refused")
    default_max_tokens: int = flag(256, "output tokens of a request that does not say")
    silence_seconds: float = flag(10.0, "a peer with open sequences that says nothing is lost")
    failover_seconds: float = flag(
        10.0, "how long a request whose target is lost waits for one that answers the same"
    )
    client_stall_seconds: float = flag(30.0, "a client that reads nothing is cancelled")
    log_prompts: bool = flag(False, "log the text of prompts")

    def __post_init__(self) -> None:
        _check_addresses(self.targets, "--target")
        _check_addresses(self.drafts, "--draft")
        if self.lookahead < 0:
            raise ConfigurationError(f"is {self.lookahead}, must be 0 or more", field="--lookahead")
        for name in (
            "max_live_requests",
            "default_max_tokens",
            "silence_seconds",
            "failover_seconds",
            "client_stall_seconds",
        ):
            value = getattr(self, name)
            if value <= 0:
                flag_name = "--" + name.replace("_", "-")
                raise ConfigurationError(f"is {value}, must be above 0", field=flag_name)

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses of the targets, one or more."""
        return _split(self.target)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Addresses of the drafts."""
        return _split(self.draft) if self.draft else ()


def _split(addresses: str) -> tuple[str, ...]:
    return tuple(address.strip() for address in addresses.split(","))


def _check_addresses(addresses: tuple[str, ...], flag_name: str) -> None:
    for index, address in enumerate(addresses):
        field_name = flag_name if len(addresses) == 1 else f"{flag_name}[{index}]"
        check_address(address, field_name)
        if address in addresses[:index]:
            raise ConfigurationError(f'is "{address}", which is there already', field=field_name)
