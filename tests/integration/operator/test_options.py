"""Invalid options are rejected, in Cilium's words where Cilium rejects them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lifecycle import GraphError, HiveError
from tests.integration.operator.recordings import load
from tests.support.counts import Count
from tests.support.operator import Operators

pytestmark = pytest.mark.anyio
STEPS = [
    (json.loads(step["do"].removeprefix("start with ")), step) for step in load("option_errors")["steps"]
]
RECORDED = load("option_errors")["options"]

REFUSED_HERE = {
    '{"ipam": "nonsense"}': "Cilium's runs and does nothing",
    '{"cluster-name": "Bad_Name"}': "Cilium's says that this will be refused",
    '{"cilium-pod-labels": "!!!=="}': "Cilium's runs and finds no pod",
    json.dumps(
        {
            "ipam": "multi-pool",
            "cluster-pool-ipv4-cidr": None,
            "auto-create-cilium-pod-ip-pools": "default=foo:1",
        }
    ): "Cilium's runs and makes no pool",
}
RUNS_HERE = {'{"nonsense-flag": "1"}': "it is given as a file, where keys of others are left alone"}


async def outcome(operators: Operators, changes: dict[str, Any]) -> str:
    values = {key: value for key, value in (RECORDED | changes).items() if value is not None}
    try:
        async with operators.running(values):
            return "runs"
    except (GraphError, HiveError) as error:
        return f"{error} {error.__cause__ or ''}"


@pytest.mark.parametrize(("changes", "step"), STEPS, ids=[str(step["n"]) for _, step in STEPS])
async def test_an_option_is_refused_as_cilium_does(
    changes: dict[str, Any], step: dict[str, Any], operators: Operators, count: Count
) -> None:
    found = await outcome(operators, changes)
    name = json.dumps(changes)
    if name in REFUSED_HERE:
        assert found != "runs"
        count("options", {f"refused here: {REFUSED_HERE[name]}": 1})
    elif name in RUNS_HERE:
        assert found == "runs"
        count("options", {f"taken here: {RUNS_HERE[name]}": 1})
    elif step["exit_code"] == "still running":
        assert found == "runs"
        count("options", {"taken by both": 1})
    else:
        assert found != "runs"
        words = [one["error"] for one in step["log_meaning"] if "cluster-pool" in one.get("msg", "")]
        assert all(one in found for one in words), found
        count("options", {"refused by both" + (", in the same words" if words else ""): 1})
