"""Exchanges with the kernel that begin before their answers are wanted."""

from cells.node.netlink.ahead.ahead import Ahead

__all__ = ["Ahead"]
