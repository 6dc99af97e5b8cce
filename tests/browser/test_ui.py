"""The page of ``hive ui``: the map, the matrix and the nodes, with mouse and keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.wait import WebDriverWait

from hive.inspect.source import hive_of
from lifecycle.graph import Timeline
from tests.support.ui import ANSWERS, FakeHubble, flow, serving

EXPLAINED = {
    "verdict": "denied",
    "headline": "denied",
    "ways": [
        {
            "destination": "shop/db",
            "port": "80/TCP",
            "verdict": "denied",
            "problem": "",
            "note": "",
            "elsewhere": [],
            "directions": [
                {
                    "direction": "ingress",
                    "verdict": "deny",
                    "enforced": True,
                    "rules": ["CiliumNetworkPolicy shop/db"],
                    "requests": [],
                    "near": [],
                }
            ],
        }
    ],
}
QUESTIONS = (
    "source=pod%2Fshop%2Fcart&destination=pod%2Fshop%2Fcart",  # the arrow keys pass it
    "source=pod%2Fshop%2Fcart&destination=pod%2Fshop%2Fweb",
    "source=pod%2Fshop%2Fweb&destination=pod%2Fshop%2Fdb&port=80&protocol=TCP",
)


PEERS = [
    {
        "peer-address": "192.0.2.8",
        "peer-asn": 65000,
        "session-state": "established",
        "families": [{"afi": "ipv4"}],
    },
    {
        "peer-address": "192.0.2.9",
        "peer-asn": 65000,
        "session-state": "active",
        "session-error": "hold timer expired",
    },
]


def few_flows() -> list[bytes]:
    return [
        *(flow("shop/web", "shop/cart", at=at) for at in range(5)),
        flow("shop/web", "shop/db", denied=True, at=1),
        flow("default/client", "shop/web", at=1),
    ]


@pytest.fixture
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    answers: dict[str, tuple[int, object]] = {
        f"/hive/policy/explain?{one}": (200, EXPLAINED) for one in QUESTIONS
    }
    answers["/v1/bgp/peers"] = (200, PEERS)
    FakeHubble.flows = getattr(request, "param", few_flows)()
    with serving(tmp_path, monkeypatch, ANSWERS | answers) as found:
        yield found


@pytest.fixture
def page(browser: Chrome, address: str) -> Iterator[Chrome]:
    browser.get_log("browser")  # type: ignore[no-untyped-call]  # of the page before
    browser.get(address)
    yield browser
    logged = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert [one for one in logged if one["level"] in {"SEVERE", "WARNING"}] == []
    browser.get("about:blank")


def until(page: Chrome, selector: str, count: int = 1) -> list[WebElement]:
    def there(_: Chrome) -> list[WebElement]:
        found = page.find_elements(By.CSS_SELECTOR, selector)
        return found if len(found) >= count else []

    return WebDriverWait(page, 20).until(there)


def text(page: Chrome, selector: str, part: str) -> None:
    WebDriverWait(page, 20).until(lambda _: part in until(page, selector)[0].text)


def test_a_workload_shows_its_peers_and_the_policy_that_denies_one(page: Chrome) -> None:
    names = {one.get_attribute("data-party") for one in until(page, ".party", 4)}
    assert names == {"shop/web", "shop/cart", "shop/db", "default/client"}
    until(page, "#lines path.denied")
    until(page, "[data-party='shop/web']")[0].click()
    text(page, "#panel", "POLICY_DENIED 1")
    for link in page.find_elements(By.CSS_SELECTOR, "#panel .why"):
        if "db" in link.find_element(By.XPATH, "..").text:
            link.click()
            break
    text(page, "#panel", "CiliumNetworkPolicy shop/db")
    before = page.find_element(By.CSS_SELECTOR, "#panel .edge")
    page.execute_script("document.activeElement.blur()")
    WebDriverWait(page, 20).until(staleness_of(before))  # the next fetch has drawn it again
    text(page, "#panel", "CiliumNetworkPolicy shop/db")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    WebDriverWait(page, 20).until(lambda _: not page.find_element(By.ID, "panel").is_displayed())


def test_the_matrix_is_walked_by_arrow_keys_and_shows_the_rule(page: Chrome) -> None:
    tab = until(page, "#show-map")[0]
    tab.send_keys(Keys.ARROW_RIGHT)
    cells = until(page, "#matrix button", 3)
    assert [one.get_attribute("class") for one in cells] == ["allowed", "denied", "allowed"]
    cells[0].send_keys(Keys.ARROW_DOWN)
    assert (
        page.switch_to.active_element.get_attribute("aria-label")
        == "shop/cart to shop/cart: allowed by a rule"
    )
    page.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    text(page, "#panel", "shop/cart to shop/web: denied by a rule")
    text(page, "#panel", "by CiliumNetworkPolicy shop/db")


def test_nodes_are_shown_this_one_first(page: Chrome) -> None:
    until(page, "#show-nodes")[0].click()
    titles = [one.text for one in until(page, "#nodes .card h2", 2)]
    assert titles == ["default/one (this one)", "default/two"]
    card = page.find_element(By.CSS_SELECTOR, ".card").text
    assert card.count("Ok fine") == 1
    assert "192.0.2.8 65000 established ipv4 0, 0" in card
    assert "192.0.2.9 65000 active hold timer expired" in card, "why a session of BGP is down"


def test_inside_a_degraded_module_is_red_and_shows_its_message_while_it_lasts(
    browser: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def healthz(level: str, message: str) -> tuple[int, object]:
        router = {"module-id": "agent.router.repair", "level": level, "message": message}
        maps = {"module-id": "agent.maps", "level": "OK", "message": ""}
        return 200, {"modules": [maps, router]}

    def named(level: str) -> set[str | None]:
        return {one.get_attribute("data-cell") for one in browser.find_elements(By.CSS_SELECTOR, f".{level}")}

    answers: dict[str, tuple[int, object]] = {
        "/hive/graph": (200, json.loads(hive_of(None, ()).graph().json())),
        "/hive/timeline": (200, json.loads(Timeline(name="agent", spans=()).json())),
        "/v1/healthz": healthz("Degraded", "no route to the pods"),
    }
    with serving(tmp_path, monkeypatch, answers) as address:
        browser.get(address)
        until(browser, "#show-inside")[0].click()
        browser.switch_to.frame(until(browser, "#inside iframe")[0])
        until(browser, "[data-cell='agent.router'].degraded")[0].click()
        text(browser, "#panel", "degraded: no route to the pods")
        assert named("cell.ok") == {"agent.maps"}
        legend = browser.find_elements(By.CSS_SELECTOR, "#legend .health")
        assert [one.text for one in legend if one.is_displayed()] == ["healthy", "degraded"]
        browser.execute_script("document.activeElement.blur()")
        answers["/v1/healthz"] = healthz("OK", "")
        until(browser, "[data-cell='agent.router'].ok")
        assert named("cell.degraded") == set()
        WebDriverWait(browser, 20).until(
            lambda _: "degraded" not in browser.find_element(By.ID, "panel").text
        )
        browser.switch_to.default_content()
        browser.get("about:blank")


TEAMS = 25
EACH = 20


def many_flows() -> list[bytes]:
    """500 workloads: each asks the next of its namespace, three of each the first of the next namespace."""
    found = [
        flow(f"team-{team:02}/app-{one:02}", f"team-{team:02}/app-{one + 1:02}", at=1)
        for team in range(TEAMS)
        for one in range(EACH - 1)
    ]
    found += [
        flow(f"team-{team:02}/app-{one:02}", f"team-{team + 1:02}/app-00", at=2)
        for team in range(TEAMS - 1)
        for one in range(3)
    ]
    found.append(flow("team-03/app-05", "team-04/app-07", denied=True, at=1))
    return found


CROWDED = """
const boxes = [...document.querySelectorAll(arguments[0])].map((one) => one.getBoundingClientRect());
const before = (a, b, start, end) => a[start] < b[end] - 1 && b[start] < a[end] - 1;
const over = (a, b) => before(a, b, 'left', 'right') && before(a, b, 'top', 'bottom');
return boxes.some((one, at) => boxes.slice(at + 1).some((other) => over(one, other)));
"""


def in_sight(page: Chrome, selector: str) -> bool:
    """Whether all of these are within the window."""
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.getBoundingClientRect())"
        ".every((box) => box.left >= 0 && box.top >= 0 && box.right <= innerWidth"
        " && box.bottom <= innerHeight)"
    )
    return bool(page.execute_script(script, selector))


@pytest.mark.parametrize("address", [many_flows], indirect=True, ids=["500"])
def test_five_hundred_workloads_are_folded_to_their_namespaces(page: Chrome, address: str) -> None:
    before = page.get_window_size()
    page.set_window_size(1280, 800 + before["height"] - page.execute_script("return innerHeight"))
    try:
        page.get(address)
        cards = until(page, ".group.folded", TEAMS)
        assert len(cards) == TEAMS
        assert page.find_elements(By.CSS_SELECTOR, ".party") == []
        assert in_sight(page, ".group")
        assert not page.execute_script(CROWDED, ".group")
        assert not page.execute_script(CROWDED, "#lines rect, .group")
        text(page, "#summary", "500 workloads in 25 namespaces")
        text(page, "[data-group='team-03']", "20 workloads")
        lines = page.find_elements(By.CSS_SELECTOR, "#lines path.allowed")
        assert len(lines) == TEAMS - 1, "three edges between two namespaces are one line"
        assert len(page.find_elements(By.CSS_SELECTOR, "#lines path.denied:not(.head)")) == 1

        until(page, "[data-act='choose team-03/']")[0].click()
        text(page, "#panel", "POLICY_DENIED 1")
        assert "Receives from" in page.find_element(By.ID, "panel").text
        numbers = {one.text for one in page.find_elements(By.CSS_SELECTOR, "#lines text")}
        assert numbers == {"0.05/s", "0.07/s✕ 1"}

        until(page, "[data-act='fold team-03']")[0].click()
        until(page, "[data-group='team-03'] .party", 8)
        text(page, "[data-group='team-03'] .more", "and 12 more")
        assert "✕ 1" in page.find_element(By.CSS_SELECTOR, "[data-party='team-03/app-05']").text

        ActionChains(page).send_keys("/").send_keys("app-17 team-20").perform()
        text(page, "#results", "team-20")
        page.switch_to.active_element.send_keys(Keys.ENTER)
        until(page, "[data-party='team-20/app-17'][aria-pressed='true']")
        assert in_sight(page, "[data-party='team-20/app-17']")
        text(page, "#panel", "team-20/app-18")

        until(page, "#denied-only")[0].click()
        WebDriverWait(page, 20).until(lambda _: len(page.find_elements(By.CSS_SELECTOR, ".group")) == 2)
        assert {one.get_attribute("data-group") for one in until(page, ".group")} == {"team-03", "team-04"}
    finally:
        page.set_window_size(before["width"], before["height"])
