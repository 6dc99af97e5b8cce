"""Cilium's recorded scenarios, replayed on our operator, result in the same objects."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import pytest

from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import ApiError, NotFoundError
from cells.operator.lb_ipam import LBIPAM, ServicePatch
from cells.operator.leader import LeaderHive
from lifecycle import HealthTree, Hive, Table
from lifecycle.testing import eventually
from tests.integration.operator import recordings
from tests.integration.operator.recordings import DIFFERENT, Json, load, options, plain
from tests.support.counts import Count
from tests.support.operator import Operators

pytestmark = pytest.mark.anyio
WITHIN = 30.0
INGRESS = "addresses of services"
DEFINITIONS = "names of definitions"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
STARTS = "operator op1 answers GET /healthz"


async def until(ask: Callable[[], Awaitable[Any]], right: Callable[[Any], bool]) -> Any:
    """The first answer that is right, or the last there was."""
    found = await ask()
    with anyio.move_on_after(WITHIN):
        while not right(found):  # the server can only be asked
            await anyio.sleep(0.02)
            found = await ask()
    return found


def settled(service: Json) -> bool:
    """Whether a service has an address, or the reason why not."""
    return service["spec"]["type"] != "LoadBalancer" or bool(service["status"].get("conditions"))


def unnamed(slices: list[Json]) -> list[Json]:
    """CiliumEndpointSlices without their names, which are made up; their endpoints in order."""
    found = [
        {
            "namespace": one["namespace"],
            "endpoints": sorted(plain(one["endpoints"]), key=lambda each: str(each["name"])),
        }
        for one in slices
    ]
    return sorted(found, key=str)


class Player:
    """Plays one scenario."""

    def __init__(self, name: str, operators: Operators, client: Client) -> None:
        self.name = name
        self.scenario = load(name)
        self._operators = operators
        self._client = client
        self._running: AsyncExitStack | None = None
        self._hive: Hive | None = None
        self.outcomes: Counter[str] = Counter()
        self._later: Json = {}
        """Options of every operator but the first: the custom resources are there."""

    async def play(self) -> None:
        first = self.scenario["steps"][0]["do"]
        await self._start(first)  # for the custom resources: what is there before is made of them
        await self.stop()
        for request in self.scenario.get("objects_before") or []:
            await self._send(request)
        for step in self.scenario["steps"]:
            starts = any(STARTS in one["for"] for one in step.get("wait_for") or [])
            late = step["do"].endswith(("restart", "meanwhile"))
            if self.name in recordings.CLEARED:
                await self._clear()
            if starts and not late:
                await self._start(step["do"])
            for request in step.get("by_test") or []:
                await self._send(request)
                if self.name in recordings.SLOWLY and self._running is not None:
                    await until(self._services, lambda found: all(map(settled, found.values())))
            if starts and late:
                await self._start(step["do"])
            await self._compare(step)
            if "exit_codes" in step:
                await until(self._ranges, all)
                await self.stop()
        await self.stop()

    async def _clear(self) -> None:
        """Delete every pool and service."""
        pools = "/apis/cilium.io/v2alpha1/ciliumloadbalancerippools"
        for one in json.loads(await self._client.raw("GET", pools))["items"]:
            await self._client.raw("DELETE", f"{pools}/{one['metadata']['name']}")
        for name, one in (await self._services()).items():
            if one["spec"]["type"] == "LoadBalancer":
                await self._client.raw("DELETE", f"/api/v1/namespaces/default/services/{name}")

    async def _start(self, step: str) -> None:
        await self.stop()
        self._running = AsyncExitStack()
        values = options(self.name, step) | self._later
        self._hive = await self._running.enter_async_context(self._operators.running(values))
        await eventually(self._collected, WITHIN)
        if self.name not in recordings.WHOLE:
            self._later = {"skip-crd-creation": "true"}

    def _collected(self) -> bool:
        """Whether the first pass over CiliumEndpoints is over: those of later steps have no pods."""
        inner = self._hive.get(LeaderHive).current if self._hive is not None else None
        return inner is not None and not [
            one
            for one in inner.get(HealthTree).snapshot("operator.leader.gc.endpoints")
            if one.message == "waiting"
        ]

    async def stop(self) -> None:
        if self._running is not None:
            await self._running.aclose()
            self._running = self._hive = None

    async def _send(self, request: Json) -> None:
        body = self._filled(request.get("body"))
        media = request.get("content_type") or "application/json"
        if isinstance(body, list):
            media = "application/json-patch+json"
        elif request["method"] == "PATCH" and media == "application/json":
            media = "application/merge-patch+json"
        data = None if body is None else json.dumps(body).encode()
        try:
            await self._client.raw(request["method"], request["path"], None, data, media.encode())
        except ApiError as error:
            if error.code != request["status"]:
                raise

    def _filled(self, body: Any) -> Any:
        text = json.dumps(body)
        text = re.sub(r"<UID:\d+>", str(uuid.uuid4()), text).replace("<TIME>", "2026-01-01T00:00:00Z")
        return json.loads(text)

    async def _compare(self, step: Json) -> None:
        wanted = dict(step.get("objects_after") or {})
        wanted |= {INGRESS: step["ingress"]} if "ingress" in step else {}
        wanted |= {DEFINITIONS: step["crds_after"]} if "crds_after" in step else {}
        if not wanted:
            return
        if (why := DIFFERENT.get((self.name, step["n"]))) is not None:
            self.outcomes[f"different: {why}"] += 1
            return
        if INGRESS in wanted:
            await self._planned({name for name, addresses in step["ingress"].items() if addresses})
        for path, recorded in wanted.items():
            right = unnamed(recorded) if path.endswith("/ciliumendpointslices") else plain(recorded)
            found = await until(partial(self._object, path, recorded), lambda it: it == right)  # noqa: B023
            assert found == right, f"{self.name}, step {step['n']}: {step['do']}: {path}"
        self.outcomes["steps that came out the same"] += 1

    async def _planned(self, names: set[str]) -> None:
        """Return once the operator has planned these services, and all that follows is written.

        What an operator before it wrote may be right, and come to be wrong.
        """
        inner = self._hive.get(LeaderHive).current if self._hive is not None else None
        if inner is None:
            return
        ipam, patches = inner.get(LBIPAM), inner.get(Table[tuple[str, str], ServicePatch])
        await eventually(
            lambda: names <= {name for _, name in ipam.plan.grants} and not patches.all(), WITHIN
        )

    async def _ranges(self) -> list[bool]:
        """Whether each CiliumNode has ranges, or the reason why not."""
        if not self.name.startswith("cp_"):
            return []
        found = json.loads(await self._client.raw("GET", "/apis/cilium.io/v2/ciliumnodes"))
        return [
            bool(one["spec"]["ipam"].get("podCIDRs") or plain(one.get("status") or {}))
            for one in found["items"]
        ]

    async def _services(self) -> dict[str, Json]:
        found = json.loads(await self._client.raw("GET", "/api/v1/services"))
        return {one["metadata"]["name"]: one for one in found["items"]}

    async def _ingress(self, recorded: Json) -> Json:
        """The addresses of services by name."""
        services = await self._services()
        return {
            name: [one["ip"] for one in services[name]["status"]["loadBalancer"].get("ingress") or ()]
            for name in recorded
        }

    async def _found(self, path: str) -> Json:
        """An object or a list; of services and pools the recordings have short paths."""
        if path.startswith("services/"):
            return (await self._services())[path.partition("/")[2]]
        if path == "ciliumloadbalancerippools":
            path = f"/apis/cilium.io/v2alpha1/{path}"
        found: Json = json.loads(await self._client.raw("GET", path))
        return found

    async def _object(self, path: str, recorded: Any) -> Any:  # noqa: PLR0911  # a form of path each
        if path == INGRESS:
            return plain(await self._ingress(recorded))
        if path == DEFINITIONS:
            found = json.loads(await self._client.raw("GET", CRDS))["items"]
            return plain(sorted(one["metadata"]["name"] for one in found))
        try:
            found = await self._found(path)
        except NotFoundError:
            return None
        if isinstance(recorded, list):
            kind = {"kind": found["kind"].removesuffix("List"), "apiVersion": found["apiVersion"]}
            items = found["items"]
            if kind["kind"] == "CiliumEndpointSlice":
                return unnamed(items)
            return [plain({**kind, **one} if "kind" in recorded[0] else one) for one in items]
        if "metadata" in recorded:
            return plain(found if "kind" in recorded else {**found, "kind": None, "apiVersion": None})
        if "items" in found:
            picked = {one["metadata"]["name"]: one for one in found["items"]}
            return plain(
                {name: {"spec": one["spec"], "status": one.get("status")} for name, one in picked.items()}
            )
        status = found.get("status") or {}
        spec = {key: found["spec"][key] for key in recorded.get("spec") or {} if key in found["spec"]}
        ingress = (status.get("loadBalancer") or {}).get("ingress")
        return plain({"ingress": ingress, "conditions": status.get("conditions"), "spec": spec})


@pytest.mark.parametrize("name", recordings.SCENARIOS)
async def test_a_recorded_scenario_comes_out_the_same(name: str, operators: Operators, count: Count) -> None:
    async with operators.client() as client:
        player = Player(name, operators, client)
        try:
            await player.play()
        finally:
            await player.stop()
    count("steps of the operator's scenarios", player.outcomes)


def test_every_scenario_is_played_or_left_out_with_a_reason(count: Count) -> None:
    outcomes = Counter(recordings.EXCLUDED.get(name, "played") for name in recordings.ALL)
    assert recordings.EXCLUDED.keys() <= set(recordings.ALL)
    count("scenarios of the operator", outcomes)
