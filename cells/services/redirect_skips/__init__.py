"""Pods that local redirect policies lead to reach what is redirected, where a policy says so.

Reconciler: the tables ``local-redirects`` and ``endpoints`` in, the maps cilium_skip_lb4 and _lb6 out.
Needs:      Table[LocalRedirect], Table[Endpoint], Maps, ServiceSettings.   Gives: RedirectSkips.
Why:        a pod that stands in for an address, such as a metadata proxy, must reach the address itself.
"""

from cells.services.redirect_skips.skips import RedirectSkip, RedirectSkips
from lifecycle import invoke, module, provide

__all__ = ["RedirectSkip", "RedirectSkips", "cell"]

cell = module(
    "redirect-skips",
    "Pods that are not redirected",
    provide(RedirectSkips),
    invoke(RedirectSkips),
)
