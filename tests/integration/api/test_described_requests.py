"""The API against its OpenAPI document: every response is a documented one.

schemathesis generates the requests of each operation: its examples, edge cases, invalid requests and random
ones, the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings

from cells.api.openapi import DESCRIBED, Described
from cells.hubble.hubble import Hubble
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from lifecycle import supply
from lifecycle.process.loop_lag import measured_loop
from tests.integration.api.described_requests import LINKED, Socket, check, example, requests_test
from tests.unit.api.node import BY_RULES, ROUTER, UNLIMITED, running_node
from tests.unit.fuzz.inputs import bounded
from tests.unit.hubble.holding import HoldingHubble


@contextmanager
def serving(directory: Path) -> Iterator[Socket]:
    """A node with a row and a change in its maps, and an event."""
    directory.mkdir()
    hubble = HoldingHubble()
    hubble.drop()
    more = [*BY_RULES, supply(hubble, Hubble)]
    with start_blocking_portal("asyncio", {"loop_factory": measured_loop}) as portal:
        manager = running_node(directory, cidr6="fd00:1::/112", settings=UNLIMITED, more=more)
        with portal.wrap_async_context_manager(manager) as node:
            node.maps.ipcache.rows[IpcacheKey.host(ROUTER).pack()] = IpcacheValue(identity=1).pack()
            assert node.maps.lxc.log is not None
            node.maps.lxc.log.note(bytes(20), None)
            yield Socket(node.socket)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Socket]:
    """A node that goes through all of it."""
    with serving(tmp_path_factory.mktemp("served") / "node") as node:
        yield node


@pytest.fixture
def ask(served: Socket) -> Socket:
    """The node, with the endpoint that the document's examples speak of."""
    served(example("PutEndpointID"))
    return served


@pytest.mark.parametrize("one", DESCRIBED, ids=lambda one: f"{one.method} {one.path}")
def test_every_answer_is_described(one: Described, ask: Socket) -> None:
    @settings(bounded(15), suppress_health_check=list(HealthCheck))  # the machine may be busy
    def answers(case: schemathesis.Case[Any]) -> None:
        check(case, ask(case))

    requests_test(one, answers)()


@pytest.mark.parametrize("one", [one for one in DESCRIBED if not one.alias], ids=lambda one: one.id)
def test_the_example_of_an_operation_gets_its_first_described_answer(one: Described, ask: Socket) -> None:
    if one.id in {"PutEndpointID", "PostIPAMIP"}:
        ask(example("DeleteEndpointID"))
        ask(example("DeleteIPAMIP"))
    assert ask(example(one.id)).status_code == one.answers[0].status


def test_ids_in_an_answer_are_found_by_the_linked_operations(tmp_path: Path) -> None:
    numbers = count()

    class Life(LINKED.as_state_machine()):  # type: ignore[misc]  # a class made at run time
        def setup(self) -> None:
            self.node = ExitStack()
            self.ask = self.node.enter_context(serving(tmp_path / str(next(numbers))))

        def teardown(self) -> None:
            self.node.close()

        def call(self, case: schemathesis.Case[Any], **_: object) -> schemathesis.Response:
            answer: schemathesis.Response = self.ask(case)
            return answer

        def validate_response(
            self, response: schemathesis.Response, case: schemathesis.Case[Any], **_: object
        ) -> None:
            check(case, response)

    Life.run(settings=settings(bounded(10), stateful_step_count=20))
