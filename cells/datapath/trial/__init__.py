"""A generation of programs is tried on packets before it carries any.

Needs: cells.maps.   Gives: load_tried, WrongObjectError.
"""

from cells.datapath.trial.loading import WrongObjectError, load_tried

__all__ = ["WrongObjectError", "load_tried"]
