"""Event subscriptions: slow subscribers, and their end."""

import pytest

from cells.observe.events import EventsSettings, Lost, Sample, Subscription
from tests.support.settings import refused

ONE, TWO, THREE = (Sample(0, bytes([n])) for n in (1, 2, 3))

pytestmark = pytest.mark.anyio


async def rest(subscription: Subscription) -> list[Sample | Lost]:
    subscription.end()
    return [event async for batch in subscription for event in batch]


async def test_events_come_in_order() -> None:
    subscription = Subscription(4)
    for event in (ONE, TWO, THREE):
        subscription.publish(event)
    assert await rest(subscription) == [ONE, TWO, THREE]
    assert subscription.lost == 0


async def test_lost_events_are_counted_at_their_position() -> None:
    subscription = Subscription(1)
    for event in (ONE, TWO, Lost(5, 0)):
        subscription.publish(event)
    assert await anext(subscription) == [ONE, Lost(6)]
    subscription.publish(THREE)
    assert await rest(subscription) == [THREE]
    assert subscription.lost == 6


async def test_lost_events_are_reported_without_a_further_event() -> None:
    subscription = Subscription(1)
    subscription.publish(ONE)
    subscription.publish(TWO)
    assert await rest(subscription) == [ONE, Lost(1)]


async def test_losses_of_the_kernel_are_counted() -> None:
    subscription = Subscription(4)
    subscription.publish(Lost(5, 0))
    assert await rest(subscription) == [Lost(5, 0)]
    assert subscription.lost == 5


@pytest.mark.parametrize("pages", [0, 3, -4, 1 << 15])
async def test_a_wrong_number_of_pages_is_refused(pages: int) -> None:
    with pytest.raises(ValueError, match=f"monitor-num-pages={pages}: expected a power of two"):
        EventsSettings(monitor_num_pages=pages).validate()


async def test_a_queue_without_room_is_refused() -> None:
    assert "expected at least 1" in refused(EventsSettings, monitor_queue_size=0)
