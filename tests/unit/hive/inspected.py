"""A started hive, for inspection."""

from __future__ import annotations

from lifecycle import Hive, Hook, Lifecycle, Settings, config, invoke, module, provide, provide_private


class HoneySettings(Settings, frozen=True):
    """Settings."""

    jars: int = 12
    """How many jars there are."""


class Cellar:
    def __init__(self, settings: HoneySettings, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open the cellar"))


class Press:
    def __init__(self, cellar: Cellar, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("oil the press"))


class Ladle:
    def __init__(self, cellar: Cellar) -> None: ...


def stall(press: Press, cellar: Cellar, lifecycle: Lifecycle) -> None:
    lifecycle.append(Hook("open the stall"))


honey = module(
    "honey",
    "Makes honey",
    module("cellar", "Where jars stand", config(HoneySettings), provide(Cellar)),
    module("press", "Presses combs", provide(Press), provide_private(Ladle)),
    module("market", "Sells it", invoke(stall)),
)
finished = Hive(honey, settings={})
