"""Settings of services.

Gives: ServiceSettings.
"""

from lifecycle import Settings


class ServiceSettings(Settings, frozen=True):
    """How services are served."""

    enable_session_affinity: bool = False
    """Whether clients of a service with sessionAffinity ClientIP stay with one backend."""
