"""HTTP/1.1 on a socket: what the API and the health port need of it, over h11's reading and framing.

No cell: who serves makes an HttpServer and starts it in a hook of its own.
Needs:  h11, a listening socket.
Gives:  Request, Response, Routes, HttpServer; listen() for sockets that clients on the node connect to.
Why:    importing aiohttp's server brings its client, TLS certificates and tracing along: 107 ms of an agent's
        start and 17 MB of its memory; h11, all that parses here, takes 6 ms and 0.5 MB.
"""

from cells.http.messages import MAX_BODY, Handler, Request, Response
from cells.http.routes import Match, Routes
from cells.http.server import HttpServer
from cells.http.unix_socket import listen

__all__ = ["MAX_BODY", "Handler", "HttpServer", "Match", "Request", "Response", "Routes", "listen"]
