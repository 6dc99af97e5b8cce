"""HTTP/1.1 on a socket, for the API and the health port, with h11's parser.

No cell: its users create an HttpServer and start it in a hook of their own.
Why:    importing aiohttp's server also imports its client, TLS certificates and tracing: 107 ms of an agent's
        start and 17 MB of memory; h11, the only parser here, takes 6 ms and 0.5 MB.
"""

from lifecycle.http.fair_queue import fair_queue_of
from lifecycle.http.limits import SCRAPED, ServerLimits
from lifecycle.http.messages import MAX_BODY, Handler, Refusal, Request, Response
from lifecycle.http.routes import Match, Routes
from lifecycle.http.server import HttpServer
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
    "fair_queue_of",
    "listen",
]
