"""Removes endpoints whose links are gone: their namespaces ended without a DEL.

Controller: looks at the links of the ``endpoints`` table, removes what has had none for a while.
Needs:  Table[Endpoint], Endpoints, EndpointAddresses, Jobs.   Gives: EndpointGC.
Why:    a runtime that is killed with its pods never says DEL; addresses, ids and policy maps would be lost.
"""

from cells.endpoint.gc.gc import EndpointGC, LinkPresence, link_presence
from cells.endpoint.gc.settings import EndpointGCSettings
from lifecycle import config, invoke, module, provide, provide_private

__all__ = ["EndpointGC", "EndpointGCSettings", "LinkPresence", "cell"]


cell = module(
    "endpoint-gc",
    "Endpoints without links, removed",
    config(EndpointGCSettings),
    provide(EndpointGC),
    provide_private(link_presence),
    invoke(EndpointGC),
)
