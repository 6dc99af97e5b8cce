"""Reads all CPUs' buffers of a perf event array, on the event loop.

For:    Events. Needs: Ring, a map descriptor of its own.   Gives: Reader.
"""

import asyncio
import errno
import struct
from collections.abc import Callable
from typing import Final

from cells.maps import Map, map_by_id
from cells.observe.events.records import Lost, Sample
from cells.observe.events.ring import Ring, RingError, online_cpus

AT_ONCE: Final = 256
"""Records taken from one buffer before other work gets its turn: some two milliseconds."""


class Reader:
    """Attached to the map from its making until it is closed. Belongs to the running event loop."""

    def __init__(self, table: Map, pages: int, tell: Callable[[Sample | Lost], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._rings: list[Ring] = []
        # Opened separately: the kernel removes the entries that were added through a descriptor when that
        # is closed. So only ours are removed, also if the agent is killed.
        self._table = map_by_id(table.id)
        try:
            for cpu in online_cpus():
                self._attach(cpu, pages)
        except BaseException:
            self.close()
            raise

    def _attach(self, cpu: int, pages: int) -> None:
        try:
            ring = Ring(cpu, pages)
        except RingError as error:
            if error.errno == errno.ENODEV:  # went offline meanwhile
                return
            raise
        self._rings.append(ring)
        self._table.update(struct.pack("<I", cpu), struct.pack("<I", ring.fd))
        self._loop.add_reader(ring.fd, self._drain, ring)

    def _drain(self, ring: Ring) -> None:
        if ring not in self._rings:  # closed while this was waiting for its turn
            return
        taken = ring.read(AT_ONCE)
        for each in taken:
            self._tell(Sample(ring.cpu, each) if isinstance(each, bytes) else Lost(each, ring.cpu))
        if len(taken) == AT_ONCE:  # the kernel reports a buffer once, not for as long as it holds something
            self._loop.call_soon(self._drain, ring)

    def close(self) -> None:
        """Leave the map as if we had not been there."""
        self._table.close()
        for ring in self._rings:
            self._loop.remove_reader(ring.fd)
            ring.close()
        self._rings.clear()
