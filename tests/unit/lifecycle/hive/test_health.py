"""Health: what is reported of which module, and that removed reports disappear."""

from hypothesis import given
from hypothesis import strategies as st

from lifecycle import HealthStatus, HealthTree


def modules(tree: HealthTree, under: str = "") -> list[str]:
    return [status.module for status in tree.snapshot(under)]


def test_a_child_that_is_removed_goes_with_all_below_it() -> None:
    tree = HealthTree()
    endpoints = tree.reporter("agent.endpoint")
    with endpoints.child("endpoint-12") as endpoint:
        endpoint.ok("ready")
        endpoint.child("policy").degraded("slow")
        endpoints.child("endpoint-123").ok()
        assert modules(tree) == [
            "agent.endpoint",
            "agent.endpoint.endpoint-12",
            "agent.endpoint.endpoint-12.policy",
            "agent.endpoint.endpoint-123",
        ]
    assert modules(tree) == ["agent.endpoint", "agent.endpoint.endpoint-123"]


def test_one_part_of_the_tree_can_be_looked_at() -> None:
    tree = HealthTree()
    for module in ("agent.ipam.expire", "agent.ipam", "agent.ipam-v6", "agent"):
        tree.reporter(module)
    assert modules(tree, "agent.ipam") == ["agent.ipam", "agent.ipam.expire"]
    assert modules(tree, "nobody") == []


def test_a_removed_health_reporter_that_reports_again_starts_anew() -> None:
    now = [1.0]
    tree = HealthTree(clock=lambda: now[0])
    child = tree.reporter("m").child("c")
    child.ok()
    child.remove()
    child.remove()
    now[0] = 2.0
    child.ok("again")
    assert tree.snapshot("m.c") == [HealthStatus("m.c", "ok", "again", 2.0)]


def test_children_that_come_and_go_leave_nothing_behind() -> None:
    tree = HealthTree()
    parent = tree.reporter("m")

    def size() -> int:
        return len(tree._statuses) + sum(1 + len(children) for children in tree._below.values())

    before = size()
    for number in range(1000):
        with parent.child(f"endpoint-{number}") as child:
            child.child("a.b").ok()
    assert size() == before
    tree.report("x.y.z", "ok", "")
    tree.forget("x.y.z")
    assert size() == before


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.lists(st.tuples(st.booleans(), NAMES), max_size=40), NAMES)
def test_the_tree_is_what_a_plain_dictionary_would_be(steps: list[tuple[bool, str]], under: str) -> None:
    tree, model = HealthTree(), set[str]()
    for forget, name in steps:
        if forget:
            tree.forget(name)
            model -= {one for one in model if f"{one}.".startswith(f"{name}.")}
        else:
            tree.report(name, "ok", "")
            model.add(name)
        assert modules(tree) == sorted(model)
        assert modules(tree, under) == sorted(one for one in model if f"{one}.".startswith(f"{under}."))
