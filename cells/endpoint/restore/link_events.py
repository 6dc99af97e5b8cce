"""News from the kernel that a link was removed.

For:   QuarantinedEndpoints.   Needs: the netlink cell's news.   Gives: KernelLinkEvents.
"""

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from cells.node.netlink import news

_RTMGRP_LINK: Final = 0x1
_RTM_DELLINK: Final = 17

REMOVED: Final = (
    (news.LOAD_HALF, 0, 0, news.TYPE),
    (news.EQUAL, 0, 1, socket.htons(_RTM_DELLINK)),
    (news.RETURN, 0, 0, news.PASS),
    (news.RETURN, 0, 0, news.DROP),
)


class KernelLinkEvents:
    """The real :class:`~cells.endpoint.restore.edges.LinkEvents`."""

    def removals(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """The event's contents are not read: the links are listed again. OSError when the socket overran."""
        return news.subscribed(_RTMGRP_LINK, REMOVED)
