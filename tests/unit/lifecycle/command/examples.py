"""Hives that the tests name as package.module:name."""

from lifecycle import Hive, Hook, Lifecycle, Settings, config, invoke, module, provide


class ShopSettings(Settings, frozen=True):
    """Settings of the shop."""

    token: str
    """Who we are."""


class Shop:
    def __init__(self, settings: ShopSettings, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open the shop"))


class Till:
    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open the till"))


def wants(nothing: bytes) -> None:
    """There is no constructor of bytes."""


shop = module("shop", "A shop", config(ShopSettings), provide(Shop), invoke(Shop))
till = module("till", "A till", provide(Till), invoke(Till))
broken = module("broken", "Broken", invoke(wants))
number = 7


def market() -> Hive:
    """A hive made by a function."""
    return Hive(till, name="market")


fixed = Hive(shop, settings={"token": "t"}, name="fixed")


def in_use(port: int) -> Hive:
    raise AssertionError(port)


async def later() -> Hive:
    return Hive(till)
