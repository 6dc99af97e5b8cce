"""Type hints as keys of the graph: how they are read and shown, and marks on them."""

from lifecycle.hints.keys import Key, type_name
from lifecycle.hints.named import Member, Named, results
from lifecycle.hints.places import Place, caller, place_of

__all__ = ["Key", "Member", "Named", "Place", "caller", "place_of", "results", "type_name"]
