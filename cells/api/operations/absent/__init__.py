"""What the API says of parts of Cilium that are not built yet: that there is nothing of it, in its own form.

Needs:  nothing.
Gives:  part(); a file for each family of cells to come.
Source: Cilium 1.17, api/v1/openapi.yaml: the documented answer where a subsystem is off, or has no objects.
Reading answers as if there were none; changing is refused with a line, never taken and forgotten.
"""

from cells.api.operations.absent import bgp, prefilter, recorder
from cells.api.part import ApiPart
from lifecycle import Member


def part() -> Member[ApiPart]:
    """All of them as a part of the API."""
    families = (prefilter, recorder, bgp)
    return ApiPart("absent", [route for family in families for route in family.ROUTES])


__all__ = ["part"]
