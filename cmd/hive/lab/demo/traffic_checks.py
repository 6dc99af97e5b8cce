"""Check ping and TCP between namespaces, as checks of a demo."""

import socket
import time

from hive.lab.demo.transcript import Transcript
from hive.lab.namespaces import Namespaces, inside
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.probe import ping, tcp_echo, tcp_echo_server

PINGS = 5
ECHOED = 1 << 20


class TrafficChecks:
    """Sends traffic between namespaces and checks that it arrives."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    def ping(self, what: str, source: Namespaces, address: str) -> None:
        """Check that PINGS echo requests are answered."""
        trips = source.run(ping, address, PINGS)
        best = f", best {min(trips) * 1e6:.0f} µs" if trips else ""
        self._transcript.check(what, len(trips) == PINGS, f"{len(trips)} of {PINGS} answered{best}")

    def echo(self, what: str, source: Namespaces, target: Namespaces, address: str, seen_as: str) -> None:
        """Check that ECHOED bytes are echoed over TCP, from the expected peer address."""
        with inside(target):
            listener = tcp_listener(socket.AF_INET6 if ":" in address else socket.AF_INET)
        with listener:
            server = target.start(tcp_echo_server, listener)
            began = time.monotonic()
            try:
                source.run(tcp_echo, (address, listener.getsockname()[1]), ECHOED)
                peers = server.finish(within=30)
            except OSError as error:
                self._transcript.check(what, False, str(error))
                return
            finally:
                server.kill()
        seconds = time.monotonic() - began
        self._transcript.check(
            what,
            peers == [seen_as],
            f"1 MiB there and back in {seconds * 1000:.0f} ms, from {', '.join(peers)}",
        )
