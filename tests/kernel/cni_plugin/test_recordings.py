"""Every recording of Cilium's plugin replayed on ours: stdout, exit code, and kernel state."""

from __future__ import annotations

import pytest

from tests.kernel.cni_plugin.differences import ALL, DIFFERENT, EXCLUDED, REPLAYED
from tests.kernel.cni_plugin.replay import Replay
from tests.support.counts import Count, not_replayed
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("name", REPLAYED)
async def test_our_plugin_does_as_recorded(name: str, in_node: None) -> None:
    await Replay(name).run()


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    assert set(EXCLUDED) <= set(ALL)
    assert {name for name, _ in DIFFERENT} <= set(REPLAYED)
    assert (len(ALL), len(REPLAYED)) == (63, 63 - len(EXCLUDED))
    title = f"recordings of the plugin ({len(DIFFERENT)} commands differ on purpose)"
    count(title, {"replayed": len(REPLAYED), **not_replayed(EXCLUDED.values())})
