"""The metrics that a port serves."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, ...], float]
"""Values of the labels to the number."""


async def scraped(port: int) -> dict[str, Samples]:
    """Every sample of this node's port, by the metric's name."""
    url = f"http://127.0.0.1:{port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as got:
        assert got.status == 200
        text = await got.text()
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found
