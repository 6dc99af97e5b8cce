"""A fake Kubernetes API server, for tests.

``python -m tests.support.apiserver`` runs it alone. In a test::

    server = ApiServer()
    async with server.serving() as url:
        ...
        server.faults.add(Fault(on("/api/v1/pods", watch=True), cut_after=3))
"""

from tests.support.apiserver.auth import User
from tests.support.apiserver.errors import StatusError
from tests.support.apiserver.faults import Fault, Faults, of_client, on
from tests.support.apiserver.server import ADMIN_TOKEN, ApiServer

__all__ = ["ADMIN_TOKEN", "ApiServer", "Fault", "Faults", "StatusError", "User", "of_client", "on"]
