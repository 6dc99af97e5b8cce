"""The operator's way to the API server.

Edge:   finds the server, lends its client; every cell that writes needs it.
Needs:  ApiServerSettings.   Gives: ClusterAPI.
"""

from cells.operator.api_server.server import ApiServerSettings, ClusterAPI
from lifecycle import config, module, provide

__all__ = ["ApiServerSettings", "ClusterAPI", "cell"]

cell = module("api-server", "The way to the API server", config(ApiServerSettings), provide(ClusterAPI))
