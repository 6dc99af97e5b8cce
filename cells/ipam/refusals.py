"""Requests for addresses that are refused, with the status and the words of Cilium's API.

For:    Allocator, Ipam, and those who ask them. Needs: nothing. Gives: IpamError, IpamLaterError.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from lifecycle.http import Refusal

NEXT_FAILED: Final = 502
FAILED: Final = 500
NOT_YET: Final = "pool not (yet) available"
NOT_SUPPORTED: Final = "Operation not supported: addresses are given by the delegated IPAM plugin"


class IpamError(Refusal):
    """A request for an address that is refused; ``status`` is the HTTP status Cilium's API gives it."""


class IpamLaterError(IpamError):
    """A request that is refused now, and may be met later."""

    def __init__(self, text: str, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__(NEXT_FAILED, text)
        self.wait = wait
        """Comes back when it may be worth another try, or never."""
