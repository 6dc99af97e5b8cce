"""The API described: every operation with its parameters, bodies and answers, and the OpenAPI document of it.

No part of the running agent: ``hive api`` and the tests import it.
Needs:  the wire types, operation_name.
Gives:  document(), DESCRIBED, Described.
Why:    who writes a client reads it, or generates one; tests send what it allows, and what it does not.
"""

from cells.api.openapi.described import Described
from cells.api.openapi.document import DESCRIBED, document

__all__ = ["DESCRIBED", "Described", "document"]
