"""The operations on services.

Gives: ServiceOperations, part.
"""

from cells.api.services.operations import ServiceOperations, part

__all__ = ["ServiceOperations", "part"]
