"""Tunnels to other nodes: options that are not served yet.

Needs: nothing.   Gives: UnservedTunnel.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedTunnel(UnservedSettings, frozen=True):
    """Tunnels to other nodes."""

    routing_mode: str = "native"
    """How packets reach other nodes; tunnels are not built yet."""
