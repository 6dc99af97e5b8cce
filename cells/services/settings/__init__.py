"""The settings of services, which several cells follow: those of services themselves, and of devices.

Gives: ServiceSettings.
Why:   native devices have programs if clients outside are served, though nothing be masqueraded there.
"""

from cells.services.settings.settings import ServiceSettings
from lifecycle import config

__all__ = ["ServiceSettings", "cell"]

cell = config(ServiceSettings)
