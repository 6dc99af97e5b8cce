"""An example for scripts: orders are delivered a minute later, and counted by customer."""

from collections.abc import Mapping
from ipaddress import IPv4Address

import msgspec

from lifecycle import (
    Derived,
    Duration,
    Jobs,
    Member,
    Settings,
    Table,
    config,
    invoke,
    minutes,
    module,
    provide,
)
from lifecycle.admin import Arguments, Command, Commands, State
from lifecycle.settings import MAC


class ShopSettings(Settings, frozen=True):
    """Settings of the shop."""

    every: Duration = minutes(1)
    """Time between two deliveries."""


class Order(msgspec.Struct, frozen=True, rename="kebab"):
    number: int
    customer: str
    ship_to: IPv4Address
    link: MAC | None = None
    tags: tuple[str, ...] = ()
    delivered: bool = False


class Customer(msgspec.Struct, frozen=True):
    name: str
    orders: int


def orders() -> Table[int, Order]:
    return Table(
        "orders",
        key=lambda order: order.number,
        indexes={"customer": lambda order: (order.customer,)},
    )


def customers(orders: Table[int, Order]) -> Derived[str, Customer]:
    def count(rows: list[Order]) -> Mapping[str, Customer]:
        names = {row.customer for row in rows}
        return {name: Customer(name, sum(row.customer == name for row in rows)) for name in names}

    return orders.derive(count, name="customers")


class Delivery:
    def __init__(self, orders: Table[int, Order], settings: ShopSettings, jobs: Jobs) -> None:
        self.orders = orders
        jobs.timer("deliver", self.deliver, settings.every)

    async def deliver(self) -> None:
        with self.orders.txn() as txn:
            for order in self.orders.all():
                txn.put(msgspec.structs.replace(order, delivered=True))


def commands(delivery: Delivery) -> Member[Commands]:
    async def deliver(state: State, _given: Arguments) -> None:
        await delivery.deliver()
        await state.print("delivered")

    return Commands(Command("shop/deliver", "Deliver everything now", deliver))


cell = module(
    "shop",
    "Delivers orders",
    config(ShopSettings),
    provide(orders, customers, Delivery, commands),
    invoke(Delivery, Derived[str, Customer]),
)
