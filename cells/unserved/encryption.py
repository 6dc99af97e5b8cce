"""Encryption between nodes: options that are not served yet.

Needs: nothing.   Gives: UnservedEncryption.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from cells.unserved.refusal import UnservedSettings


class UnservedEncryption(UnservedSettings, frozen=True):
    """Encryption between nodes."""

    enable_ipsec: bool = False
    """Traffic is not encrypted yet."""

    enable_wireguard: bool = False
    """Traffic is not encrypted yet."""

    encrypt_node: bool = False
    """Traffic is not encrypted yet."""

    enable_encryption_strict_mode: bool = False
    """Traffic is not encrypted yet."""
