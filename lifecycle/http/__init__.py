"""HTTP/1.1 on a socket: what the API and the health port need of it, over h11's reading and framing.

No cell: who serves makes an HttpServer and starts it in a hook of its own.
Why:    importing aiohttp's server brings its client, TLS certificates and tracing along: 107 ms of an agent's
        start and 17 MB of its memory; h11, all that parses here, takes 6 ms and 0.5 MB.
"""

from lifecycle.http.limits import SCRAPED, ServerLimits
from lifecycle.http.messages import MAX_BODY, Handler, Refusal, Request, Response
from lifecycle.http.routes import Match, Routes
from lifecycle.http.server import HttpServer
from lifecycle.http.turns import turns_of
from lifecycle.process import clear_socket, listen

__all__ = [
    "MAX_BODY",
    "SCRAPED",
    "Handler",
    "HttpServer",
    "Match",
    "Refusal",
    "Request",
    "Response",
    "Routes",
    "ServerLimits",
    "clear_socket",
    "listen",
    "turns_of",
]
