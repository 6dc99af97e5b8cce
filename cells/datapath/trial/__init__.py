"""A generation of programs is tried on packets before it carries any.

Needs: cells.maps.   Gives: self_check, try_packets, lent.
"""

from cells.datapath.trial.selfcheck import lent, self_check, try_packets

__all__ = ["lent", "self_check", "try_packets"]
