"""How tables that follow from others key by key work out what changed; ReadTable makes the tables.

Needs:  the rows of the tables they follow from.
Gives:  nothing by itself: each kind is loaded when a table of it is made.
"""
