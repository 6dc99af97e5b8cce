"""The operations on services.

Gives: ServiceOperations, part.
"""

from cells.api.operations.services.operations import ServiceOperations, part

__all__ = ["ServiceOperations", "part"]
