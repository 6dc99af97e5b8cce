"""Drives a page of ``hive inspect`` in a browser: clicks, searches, drags and reads what is shown."""

from pathlib import Path

from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from lifecycle.graph import Graph, Timeline


def shown(
    browser: Chrome,
    directory: Path,
    graph: Graph,
    timeline: Timeline | None = None,
    health: dict[str, tuple[str, str]] | None = None,
) -> "Page":
    """Open the page of the graph from a file."""
    file = directory / "hive.html"
    file.write_text(graph.html(timeline, health))
    browser.get_log("browser")  # type: ignore[no-untyped-call]  # of the page before
    browser.get(file.as_uri())
    if graph.nodes:
        WebDriverWait(browser, 20).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".cell"))
    return Page(browser)


CUT_OFF = """
const cut = [];
for (const card of document.querySelectorAll('.cell')) {
  const edge = card.getBoundingClientRect();
  const walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const style = getComputedStyle(walker.currentNode.parentElement);
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) {
      const over = [edge.left - box.left, edge.top - box.top, box.right - edge.right,
        box.bottom - edge.bottom];
      if (style.visibility === 'hidden' || !box.width) continue;
      if (Math.max(...over) > 1) cut.push(walker.currentNode.data);
    }
  }
}
return cut;
"""


class Page:
    """The open page: user actions, and what is visible."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    @property
    def cells(self) -> list[WebElement]:
        return self.browser.find_elements(By.CLASS_NAME, "cell")

    def cell(self, module: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, f'[data-cell="{module}"]')

    def click(self, module: str) -> str:
        """Click the cell; return the text of the panel."""
        self.cell(module).click()
        return self.panel

    @property
    def is_far(self) -> bool:
        """Return whether the zoom is so small that cells show only their names."""
        return "far" in (self.browser.find_element(By.ID, "canvas").get_attribute("class") or "").split()

    @property
    def panel(self) -> str:
        return self.browser.find_element(By.ID, "panel").text

    def named(self, *kinds: str) -> set[str]:
        """Return the modules of the cells that have all these CSS classes."""
        found = self.browser.find_elements(By.CSS_SELECTOR, "".join(f".{kind}" for kind in ("cell", *kinds)))
        return {cell.get_attribute("data-cell") or "" for cell in found}

    @property
    def level(self) -> str:
        """Return the level of detail that the legend shows."""
        return self.browser.find_element(By.ID, "level").text

    def inside(self, node: str) -> WebElement:
        """Return the element of a constructor or hook in its cell."""
        return self.browser.find_element(By.CSS_SELECTOR, f'[data-node="{node}"], [data-hook="{node}"]')

    def double_click(self, module: str) -> None:
        """Click twice at the cell's place; the second click hits whatever is there by then.

        It uses the page's events: two clicks of the driver count as single ones when the browser is slow.
        """
        self.browser.execute_script(
            "const box = arguments[0].getBoundingClientRect();"
            "const at = {bubbles: true, clientX: box.left + box.width / 2,"
            "clientY: box.top + box.height / 2};"
            "const send = (kind, detail) => document.elementFromPoint(at.clientX, at.clientY)"
            ".dispatchEvent(new MouseEvent(kind, {...at, detail}));"
            "send('click', 1); send('click', 2); send('dblclick', 2);",
            self.cell(module),
        )

    def arrows(self, kind: str = "", layer: str = "arrows") -> list[WebElement]:
        """Return the arrows of a kind, drawn or not; those inside cells are in the layer `fine`."""
        return self.browser.find_elements(By.CSS_SELECTOR, f"#{layer} > path{kind and '.'}{kind}")

    def cut_off(self) -> list[str]:
        """Return the visible texts that extend beyond an edge of their cell."""
        found: list[str] = self.browser.execute_script(CUT_OFF)
        return found

    def search(self, text: str) -> list[list[str]]:
        """Type into the search field; return the lines of each result."""
        field = self.browser.find_element(By.ID, "search")
        field.clear()
        field.send_keys(text)
        return [one.text.split("\n") for one in self.browser.find_elements(By.CSS_SELECTOR, "#results li")]

    def press(self, key: str) -> None:
        self.browser.switch_to.active_element.send_keys(key)

    def open_view(self, view: str) -> None:
        self.browser.find_element(By.ID, view).click()

    @property
    def found(self) -> str:
        return self.browser.find_element(By.ID, "found").text

    def drag(self, right: int, down: int) -> None:
        """Drag the canvas by its lower left corner, where it is empty."""
        canvas = self.browser.find_element(By.ID, "canvas")
        size = canvas.size
        start = ActionChains(self.browser, duration=10)
        start.move_to_element_with_offset(canvas, 20 - size["width"] // 2, size["height"] // 2 - 60)
        start.click_and_hold().move_by_offset(right // 2, down // 2).move_by_offset(
            right - right // 2, down - down // 2
        )
        start.release().perform()

    def wheel(self, module: str, amount: int) -> None:
        """Turn the wheel over a cell."""
        left, top, width, height = self.boxes()[module]
        self.wheel_at(left + width / 2, top + height / 2, amount)

    def wheel_at(self, x: float, y: float, amount: int) -> None:
        """Turn the wheel over a place on the screen."""
        self.browser.execute_script(
            "document.getElementById('canvas').dispatchEvent(new WheelEvent('wheel', {deltaY: arguments[0], "
            "clientX: arguments[1], clientY: arguments[2], bubbles: true, cancelable: true}))",
            amount,
            x,
            y,
        )

    def approach(self, module: str) -> None:
        """Zoom in on a cell until it has room for more than its name."""
        while self.is_far:
            left, top, _, _ = self.boxes()[module]
            self.wheel_at(left + 10, top + 10, -200)

    def boxes(self) -> dict[str, tuple[float, float, float, float]]:
        """Return left, top, width and height on the screen of every cell."""
        found: dict[str, list[float]] = self.browser.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('.cell')].map((one) => {"
            "const box = one.getBoundingClientRect();"
            "return [one.dataset.cell, [box.left, box.top, box.width, box.height]]; }))"
        )
        return {name: (box[0], box[1], box[2], box[3]) for name, box in found.items()}

    def script(self, text: str) -> object:
        result: object = self.browser.execute_script(text)
        return result

    def wait_for(self, text: str) -> None:
        """Wait until the panel shows this."""
        WebDriverWait(self.browser, 60).until(lambda _: text in self.panel)

    @property
    def complaints(self) -> list[str]:
        return [str(entry["message"]) for entry in self.browser.get_log("browser")]  # type: ignore[no-untyped-call]


__all__ = ["Keys", "Page", "shown"]
