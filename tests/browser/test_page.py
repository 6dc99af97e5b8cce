"""The page of ``hive inspect --format html``: clicks, search, drag and zoom."""

import itertools
import re
from pathlib import Path

import msgspec
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from cells.agent import agent
from lifecycle import Hive, invoke, module, provide
from lifecycle.graph import Graph, Span, Timeline
from tests.browser.big_graph import big_graph
from tests.browser.page import Keys, Page, shown


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Hive(agent, settings={"mtu": 1400}).graph()


@pytest.fixture
def page(browser: Chrome, tmp_path: Path, graph: Graph) -> Page:
    return shown(browser, tmp_path, graph)


def ran(graph: Graph) -> Timeline:
    """Every hook took 2 ms, one after the other; every constructor 1."""
    construct = [node for node in graph.constructors if node.built and node.kind == "provide"]
    spans = [Span(node.id, "construct", at / 1000, 0.001) for at, node in enumerate(construct)]
    spans += [Span(hook.id, "start", 0.1 + at / 500, 0.002) for at, hook in enumerate(graph.hooks)]
    return Timeline(name=graph.name, spans=tuple(spans))


def test_every_module_that_holds_something_is_a_cell(page: Page, graph: Graph) -> None:
    holding = {one.module for one in (*graph.nodes, *graph.settings, *graph.hooks)}
    assert page.named() == holding
    page.approach("agent.router")
    assert page.cell("agent.router").text.startswith("router\nprovides 4")


def test_a_click_shows_what_a_cell_provides_needs_and_runs(page: Page, graph: Graph) -> None:
    panel = page.click("agent.router")
    for part in (
        "agent.router",
        "Gateway of this node's pods",
        "Provides\nRouter",
        "needs RestoredPods, RouterAddresses",
        "node/router.py:",
        "Hooks\nset up the router",
    ):
        assert part in panel
    assert "given by the hive: Lifecycle" in panel
    modules = {node.id: node.module for node in graph.nodes}
    needs = {modules[one.target] for one in graph.edges if modules.get(one.source) == "agent.router"}
    assert page.named("needs") == needs - {"agent.router"}
    assert "agent.api" in page.named("users")
    assert page.named("chosen") == {"agent.router"}


def test_a_click_shows_what_a_cell_sets_and_from_where(page: Page) -> None:
    panel = page.click("agent.config")
    assert "Sets\nstate-dir = /var/run/cilium" in panel
    mtu = next(line for line in panel.splitlines() if line.startswith("mtu = 1400"))
    assert mtu.endswith("code")


def test_links_in_the_panel_lead_to_other_cells(page: Page) -> None:
    page.click("agent.router")
    page.browser.find_element(By.XPATH, "//aside//button[text()='Ipam']").click()
    page.wait_for("Pod addresses")
    assert page.named("chosen") == {"agent.ipam"}
    assert "Ipam" in page.browser.find_element(By.CSS_SELECTOR, "#panel .flash").text


def test_the_background_and_escape_choose_nothing(page: Page) -> None:
    page.click("agent.router")
    page.press(Keys.ESCAPE)
    assert page.named("chosen") == set()
    assert not page.browser.find_element(By.ID, "panel").is_displayed()


def test_a_search_lists_and_marks_what_it_finds(page: Page) -> None:
    results = page.search("table")
    assert ["type", "Table[int, Device]", "agent.devices"] in results
    assert {"agent.devices", "agent.endpoint"} <= page.named("match")
    assert page.found == f"{len(page.named('match'))} of {len(page.cells)} cells"


@pytest.mark.parametrize(
    ("text", "kind", "cell", "states"),
    [
        ("ipv4-range", "setting", "agent.ipam-settings", "ipv4-range = auto"),
        ("set up the router", "hook", "agent.router", "set up the router"),
        ("PolicyMaps", "type", "agent.maps", "PolicyMaps"),
        ("datapath", "cell", "agent.datapath", "eBPF programs of the node"),
    ],
)
def test_enter_goes_to_the_best_result(text: str, kind: str, cell: str, states: str, page: Page) -> None:
    results = page.search(text)
    assert (results[0][0], results[0][2]) == (kind, cell)
    page.press(Keys.ENTER)
    page.wait_for(states)
    assert page.named("chosen") == {cell}
    assert page.named("match") == set()


def test_a_search_without_matches_shows_a_message(page: Page) -> None:
    assert page.search("no such thing") == []
    assert page.found.startswith("0 of ")
    page.press(Keys.ESCAPE)
    assert page.found == ""


def test_dragging_pans_and_chooses_nothing(page: Page) -> None:
    before = page.boxes()["agent.api"]
    page.drag(120, -40)
    after = page.boxes()["agent.api"]
    assert (round(after[0] - before[0]), round(after[1] - before[1])) == (120, -40)
    assert after[2] == pytest.approx(before[2])
    assert page.named("chosen") == set()


def test_the_keyboard_walks_through_cells_and_chooses_them(page: Page) -> None:
    page.wheel("agent.router", -900)  # so that others are out of sight
    first = page.cells[0]
    page.script("document.querySelector('#theme').focus()")
    page.press(Keys.TAB)
    page.press(Keys.ENTER)
    assert page.named("chosen") == {first.get_attribute("data-cell")}
    left, top, _, _ = page.boxes()[first.get_attribute("data-cell") or ""]
    assert 0 < left < 1400
    assert 50 < top < 900


def test_the_wheel_zooms_around_the_pointer_and_a_key_shows_all_again(page: Page) -> None:
    start = page.boxes()
    page.wheel("agent.router", -400)
    closer = page.boxes()
    middle = [box[0] + box[2] / 2 for box in (start["agent.router"], closer["agent.router"])]
    assert closer["agent.router"][2] > 1.5 * start["agent.router"][2]
    assert middle[0] == pytest.approx(middle[1], abs=1)
    page.press("0")
    assert page.boxes()["agent.router"] == pytest.approx(start["agent.router"], abs=1)


def test_cells_stand_below_what_they_need_and_apart(browser: Chrome, tmp_path: Path) -> None:
    graph = big_graph(60)
    boxes = shown(browser, tmp_path, graph).boxes()
    of = {node.id: node.module for node in graph.nodes}
    lower = [(of[edge.source], of[edge.target]) for edge in graph.edges if of[edge.source] != of[edge.target]]
    assert all(boxes[user][1] > boxes[need][1] for user, need in lower)
    assert overlaps(boxes) == []


def overlaps(boxes: dict[str, tuple[float, float, float, float]]) -> list[tuple[str, str]]:
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2)
        if a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
    ]


def test_rows_of_the_start_chart_link_to_their_cells(browser: Chrome, tmp_path: Path, graph: Graph) -> None:
    page = shown(browser, tmp_path, graph, ran(graph))
    page.open_view("show-start")
    rows = browser.find_elements(By.CSS_SELECTOR, "#start .row[data-hook]")
    assert len(rows) == len(graph.hooks)
    assert all("2.0 ms" in row.text for row in rows)
    router = next(row for row in rows if "set up the router" in row.text)
    held = next(hook for hook in graph.hooks if hook.name == "set up the router").after[-1]
    name = next(hook.name for hook in graph.hooks if hook.id == held)
    assert f"held by {name}" in (router.get_attribute("title") or "")
    router.click()
    page.wait_for("set up the router 2.0 ms")
    page.open_view("show-cells")
    assert page.named("chosen") == {"agent.router"}


def test_without_a_timeline_there_is_no_chart(page: Page) -> None:
    assert not page.browser.find_element(By.ID, "show-start").is_displayed()


def test_the_colour_scheme_switches_between_light_and_dark(page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = [page.script(ground)]
    for _ in range(2):
        page.open_view("theme")
        seen.append(page.script(ground))
    assert seen[0] == seen[2] != seen[1]


def test_the_page_loads_no_resource_and_logs_no_error(page: Page) -> None:
    assert page.script("return performance.getEntriesByType('resource').map((one) => one.name)") == []
    assert page.complaints == []


def test_names_are_text_whatever_they_hold(browser: Chrome, tmp_path: Path, graph: Graph) -> None:
    nasty = '</script><img src=x onerror="document.title=1">$title'
    modules = [
        msgspec.structs.replace(one, title=nasty) if one.id == "agent.ipam" else one for one in graph.modules
    ]
    page = shown(browser, tmp_path, msgspec.structs.replace(graph, modules=tuple(modules), name=nasty))
    assert nasty in page.click("agent.ipam")
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.find_element(By.TAG_NAME, "h1").text == nasty


def test_titles_and_names_are_never_cut(page: Page) -> None:
    for _ in range(14):
        assert page.cut_off() == []
        page.press("+")
    page.press("0")
    for _ in range(4):
        page.press("-")
        assert page.cut_off() == []


def test_a_selected_cell_shows_its_purpose(page: Page) -> None:
    page.approach("agent.router")
    assert "Gateway of this node's pods" in page.cell("agent.router").text


def test_every_arrow_has_a_head_at_what_is_needed(page: Page) -> None:
    page.click("agent.datapath")
    heads = "return getComputedStyle(arguments[0]).markerStart"
    drawn = page.arrows()
    assert drawn
    assert {page.browser.execute_script(heads, one) for one in drawn} >= {
        'url("#head")',
        'url("#head-needs")',
        'url("#head-users")',
    }
    assert all("head" in page.browser.execute_script(heads, one) for one in drawn)
    above = (
        "return parseFloat(arguments[0].getAttribute('d').match(/^M[^,]+,([^C]+)C/)[1])"
        " < CELLS.get('agent.datapath').y"
    )
    assert all(page.browser.execute_script(above, one) for one in page.arrows("needs"))


def test_the_legend_explains_what_is_drawn(page: Page) -> None:
    legend = page.browser.find_element(By.ID, "legend").text
    for text in ("needed, starts first", "chosen one", "need each other", "a fault", "invokes something"):
        assert text in legend


def test_zooming_in_shows_constructors_and_then_hooks(page: Page) -> None:
    assert page.level == "modules"
    assert page.inside("agent.router/Router").text == ""
    page.double_click("agent.router")
    assert page.level == "constructors"
    assert re.match(r"Router\n\S*node/router\.py:\d+\n", page.inside("agent.router/Router").text)
    left, top, _, _ = page.boxes()["agent.router"]
    page.wheel_at(left + 10, top + 10, -900)
    assert page.level == "hooks"
    assert page.inside("agent.router/Router:0").text == "set up the router"
    page.press("0")
    assert page.level == "modules"


def test_a_constructor_that_is_clicked_shows_its_own_arrows(page: Page, graph: Graph) -> None:
    page.double_click("agent.router")
    page.inside("agent.router/Router").find_element(By.TAG_NAME, "b").click()
    assert "Router" in page.browser.find_element(By.CSS_SELECTOR, "#panel .flash").text
    needs = {edge.target for edge in graph.edges if edge.source == "agent.router/Router"}
    assert len(page.arrows("needs", "fine")) == len(needs)
    page.inside("agent.router/Router:0").click()
    assert "waits for" in page.browser.find_element(By.CSS_SELECTOR, "#panel .flash").text


def test_a_source_location_opens_in_the_chosen_editor(page: Page, graph: Graph) -> None:
    page.click("agent.router")
    router = next(node for node in graph.constructors if node.id == "agent.router/Router")
    place = page.browser.find_element(By.CSS_SELECTOR, "#panel a.place")
    assert place.get_attribute("href") == f"vscode://file{router.file}:{router.line}"
    page.browser.find_element(By.XPATH, "//aside//option[text()='this browser']").click()
    place = page.browser.find_element(By.CSS_SELECTOR, "#panel a.place")
    assert place.get_attribute("href") == f"file://{router.file}"
    page.script("localStorage.clear()")


def test_users_of_injected_types_are_marked_and_listed(page: Page, graph: Graph) -> None:
    users = {node.module for node in graph.nodes if "Health" in node.injected}
    page.browser.find_element(By.CSS_SELECTOR, "#uses option[value='Health']").click()
    assert page.named("match") == users
    assert f"in {len(users)} modules" in page.panel
    page.press(Keys.ESCAPE)
    assert page.named("match") == set()
    page.click("agent.router")
    page.browser.find_element(By.XPATH, "//aside//button[text()='Jobs']").click()
    page.wait_for("given by the hive to whoever asks for it")
    assert page.search("logg")[0][:2] == ["hive", "Logger"]
    page.press(Keys.ENTER)
    page.wait_for("Logger")


def test_users_of_a_table_are_listed_with_its_provider(page: Page, graph: Graph) -> None:
    page.browser.find_element(By.CSS_SELECTOR, "#uses option[value='Table[int, Device]']").click()
    made = next(node.id for node in graph.constructors if node.provides == "Table[int, Device]")
    users = {edge.source.partition("/")[0] for edge in graph.edges if edge.target == made}
    assert page.named("match") == {*users, made.partition("/")[0]}
    assert "Is made by\nTable[int, Device] from device_table" in page.panel


def test_the_first_picture_is_legible_and_as_wide_as_a_window_of_1280_pixels(page: Page) -> None:
    """Names of one size, of 11 pixels or more; from the sources at the top, without circles."""
    before = page.browser.get_window_size()
    page.browser.set_window_size(1280, 900)
    try:
        page.browser.refresh()
        names = page.browser.execute_script(
            "return [...document.querySelectorAll('.cell .head b')].map("
            "(one) => parseFloat(getComputedStyle(one).fontSize) * view.scale)"
        )
        assert max(names) - min(names) < 0.01
        assert min(names) >= 11
        assert page.cut_off() == []
        boxes = page.boxes()
        assert overlaps(boxes) == []
        left, right = min(box[0] for box in boxes.values()), max(box[0] + box[2] for box in boxes.values())
        assert left >= 0
        assert right <= 1280
        assert right - left > 1100
        assert 50 < min(box[1] for box in boxes.values()) < 100
        assert page.named("circle") == set()
    finally:
        page.browser.set_window_size(before["width"], before["height"])


def test_the_health_of_a_running_hive_is_the_colour_of_its_modules(
    browser: Chrome, tmp_path: Path, graph: Graph
) -> None:
    health = {
        "agent.maps": ("ok", ""),
        "agent.router.repair": ("degraded", "no route to the pods"),
        "agent.router.watch": ("ok", ""),
        "agent.shell": ("stopped", "done"),
    }
    page = shown(browser, tmp_path, graph, health=health)
    assert page.named("ok") == {"agent.maps"}
    assert page.named("degraded") == {"agent.router"}
    assert "degraded: no route to the pods" in page.click("agent.router")
    colours = {
        page.cell(one).value_of_css_property("background-color") for one in ("agent.maps", "agent.router")
    }
    assert len({*colours, page.cell("agent.api").value_of_css_property("background-color")}) == 3
    legend = page.browser.find_elements(By.CSS_SELECTOR, "#legend .health")
    assert [one.text for one in legend if one.is_displayed()] == ["healthy", "degraded"]
    assert page.complaints == []


class A: ...


class B:
    def __init__(self, a: A) -> None: ...


class C:
    def __init__(self, b: B) -> None: ...


def test_modules_that_need_each_other_are_drawn(browser: Chrome, tmp_path: Path) -> None:
    one, other = module("one", "One", provide(A, C)), module("other", "Other", provide(B))
    page = shown(browser, tmp_path, Hive(one, other, invoke(C)).graph())
    assert page.named() == {"hive", "one", "other"}
    assert page.named("circle") == {"one", "other"}
    assert len(page.arrows("circle")) == 2
    assert "needs and is needed by other" in page.click("one")
    assert "other" in page.named("needs", "users")
    assert page.complaints == []


class Removed: ...


class Lacking:
    def __init__(self, vanished: Removed) -> None: ...


class Left:
    def __init__(self, right: "Right") -> None: ...


class Right:
    def __init__(self, left: Left) -> None: ...


def test_a_graph_with_faults_is_drawn_with_them_in_red(browser: Chrome, tmp_path: Path) -> None:
    cells = (
        module("one", "One", provide(Lacking, Left)),
        module("two", "Two", provide(Right)),
        module("fine", "Fine", provide(A), invoke(A)),
    )
    page = shown(browser, tmp_path, Hive(*cells).graph(faulty=True))
    assert page.named("fault") == {"missing Removed", "one", "two"}
    assert page.named("missing") == {"missing Removed"}
    assert len(page.arrows("fault")) == 3
    assert page.cut_off() == []
    page.open_view("faults")
    page.wait_for("nothing provides Removed")
    assert "Left -> Right -> Left" in page.panel
    assert "do: add a cell that provides it" in page.panel
    page.browser.find_element(By.XPATH, "//aside//button[text()='Lacking']").click()
    page.wait_for("needs Removed: nothing provides it")
    assert page.complaints == []


def test_a_graph_without_faults_shows_none(page: Page) -> None:
    assert page.named("fault") == set()
    assert not page.browser.find_element(By.ID, "faults").is_displayed()


def test_a_hive_without_cells_is_an_empty_page(browser: Chrome, tmp_path: Path) -> None:
    page = shown(browser, tmp_path, Hive().graph())
    assert page.cells == []
    assert page.complaints == []


def test_five_hundred_cells_stay_usable(browser: Chrome, tmp_path: Path) -> None:
    page = shown(browser, tmp_path, big_graph(500))
    assert len(page.cells) == 500
    assert page.cut_off() == []
    boxes = page.boxes()
    assert overlaps(boxes) == []
    assert all(box[0] >= 0 and box[0] + box[2] <= 1400 and 0 <= box[1] <= 900 for box in boxes.values())
    assert page.search("option-421")[0] == ["setting", "option-421", "big.family-1.cell-421"]
    page.press(Keys.ENTER)
    page.wait_for("Does thing 421")
    left, top, width, height = page.boxes()["big.family-1.cell-421"]
    assert width > 100  # near enough to read
    assert 0 < left < 1400 - width
    assert 50 < top < 900 - height
    assert page.complaints == []
