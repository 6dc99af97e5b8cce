"""The settings of services, which several cells follow: those of services themselves, and of devices.

Gives: ServiceSettings, AnnouncementSettings, Seed.
Why:   native devices have programs if clients outside are served, though nothing be masqueraded there.
"""

from cells.services.settings.announcements import AnnouncementSettings
from cells.services.settings.seed import DEFAULT_SEED, Seed
from cells.services.settings.settings import ServiceSettings
from lifecycle import config, module

__all__ = ["DEFAULT_SEED", "AnnouncementSettings", "Seed", "ServiceSettings", "cell"]

cell = module("service-settings", "What is served, and how", config(ServiceSettings, AnnouncementSettings))
