"""Our programs compared with recordings of Cilium's on the same maps and packets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.kernel.datapath_replay.compare import differences
from tests.kernel.datapath_replay.node import Node
from tests.kernel.datapath_replay.recordings import Recording, load_all
from tests.kernel.datapath_replay.rules import reason_not_to_replay
from tests.support.counts import Count
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel

RECORDINGS = load_all()
REPLAYED = [each for each in RECORDINGS if reason_not_to_replay(each) is None]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Maps and programs."""
    need_root()
    with Node() as node:
        yield node


@pytest.mark.parametrize("recording", REPLAYED, ids=lambda recording: recording.name)
def test_a_packet_fares_as_it_did_with_cilium(node: Node, recording: Recording) -> None:
    found = differences(recording, node.replay(recording))
    assert not found, "\n".join(found)


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    areas = Counter(each.area for each in REPLAYED)
    reasons = Counter(reason for each in RECORDINGS if (reason := reason_not_to_replay(each)))
    assert areas.total() + reasons.total() == len(RECORDINGS)
    count("recordings of the datapath", {f"replayed: {area}": number for area, number in areas.items()})
    count("recordings of the datapath", {f"not: {reason}": number for reason, number in reasons.items()})
