// Mouse, fingers and the Tab key on the drawing.

const SECOND_CLICK = 350; // milliseconds: until then nothing moves, for the second click belongs to the same cell

function listenToPointers() {
  let later, reveal;
  new ResizeObserver(() => { // the first click opens the panel
    clearTimeout(later);
    later = setTimeout(() => view.whole && fit(), SECOND_CLICK);
  }).observe(canvas);
  const fingers = new Map();
  let moved = 0;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    const step = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
    zoomAt(event.clientX - box.left, event.clientY - box.top, Math.exp(-step * 0.0016));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || event.target.closest("#zoom")) return;
    fingers.set(event.pointerId, event);
    moved = 0;
  });
  addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    moved += Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY);
    if (fingers.size === 1 && moved > 3) {
      canvas.classList.add("dragging");
      view.whole = false;
      view.x += event.clientX - before.clientX;
      view.y += event.clientY - before.clientY;
      place();
    } else if (fingers.size === 2) {
      const other = [...fingers.values()].find((one) => one.pointerId !== event.pointerId);
      const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) || 1;
      const box = canvas.getBoundingClientRect();
      zoomAt((event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top,
        apart(event) / apart(before));
    }
    fingers.set(event.pointerId, event);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    addEventListener(end, (event) => {
      fingers.delete(event.pointerId);
      canvas.classList.remove("dragging");
    });
  }
  // who walks through the cells with the Tab key sees where he is; the browser's own way would be to scroll
  canvas.addEventListener("scroll", () => canvas.scrollTo(0, 0));
  const layer = document.getElementById("cells");
  layer.addEventListener("focusin", (event) => {
    if (event.target.matches(".cell:focus-visible")) bringIntoView(CELLS.get(event.target.dataset.cell));
  });
  layer.addEventListener("keydown", (event) => {
    const card = event.target.closest(".cell");
    if (card && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      choose(card.dataset.cell);
    }
  });
  canvas.addEventListener("click", (event) => {
    if (moved > 3 && event.detail) return; // it was a drag; a key's click has no detail
    if (event.target.closest("#zoom")) return;
    const card = event.target.closest(".cell");
    const item = event.target.closest("[data-hook], [data-node]");
    choose(card ? card.dataset.cell : null, item && (item.dataset.hook || item.dataset.node), true);
    clearTimeout(reveal);
    if (card) reveal = setTimeout(() => bringIntoView(CELLS.get(card.dataset.cell)), SECOND_CLICK);
  });
  // By its first click: the panel may have opened over the cell before the second.
  let first = null;
  document.addEventListener("click", (event) => {
    if (event.detail === 1) first = canvas.contains(event.target) ? event.target.closest(".cell") : null;
  }, true);
  document.addEventListener("dblclick", (event) => {
    if (!first) return;
    clearTimeout(reveal);
    const box = canvas.getBoundingClientRect();
    enter(CELLS.get(first.dataset.cell), event.clientX - box.left, event.clientY - box.top);
  });
}
