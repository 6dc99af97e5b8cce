// The drawing: cells and arrows on a plane that pans and zooms.

const canvas = document.getElementById("canvas");
const world = document.getElementById("world");
const view = { x: 0, y: 0, scale: 1, whole: true }; // whole: all is shown, and stays so when the window changes
const LIMITS = { least: 0.04, most: 2.5 };
const cards = new Map();
let arrowPaths = [];

function draw() {
  const arrows = layOut(CELLS);
  const layer = document.getElementById("cells");
  for (const cell of CELLS.values()) {
    const card = make("button", {
      class: `cell${cell.invokes.length ? " root" : ""}${isUnused(cell) ? " unused" : ""}`,
      "data-cell": cell.id,
      title: `${cell.id}${cell.title ? `: ${cell.title}` : ""}`,
      style: `left:${cell.x - CELL.width / 2}px;top:${cell.y - CELL.height / 2}px;--hue:${cell.hue}`,
    }, make("b", null, cell.name), make("span", null, contents(cell)));
    cards.set(cell.id, card);
    layer.append(card);
  }
  const svg = document.getElementById("arrows");
  arrowPaths = arrows.map((arrow) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", curve(arrow.points));
    if (arrow.extra) path.classList.add("extra");
    svg.append(path);
    return { ...arrow, path };
  });
  fit();
}

function isUnused(cell) {
  const live = cell.constructors.some((node) => node.built);
  return !live && !cell.invokes.length && cell.constructors.length > 0;
}

function contents(cell) {
  const provided = cell.constructors.filter((node) => node.kind !== "config" && !node.replaced).length;
  const parts = [];
  if (provided) parts.push(`provides ${provided}`);
  if (cell.settings.length) parts.push(`sets ${cell.settings.length}`);
  if (cell.hooks.length) parts.push(counted(cell.hooks.length, "hook"));
  return parts.join(" · ") || cell.title;
}

// From the lower edge of what is needed, through the bends, to the upper edge of what needs it. A pair that
// stands the other way round (a cycle between modules) is drawn between the facing edges.
function curve(points) {
  const half = CELL.height / 2;
  const way = points.map(([x, y]) => [x, y]);
  const last = way.length - 1;
  const turn = way[0][1] <= way[last][1] ? 1 : -1;
  way[0][1] += turn * half;
  way[last][1] -= turn * half;
  let path = `M${way[0][0]},${way[0][1]}`;
  for (let step = 1; step < way.length; step++) {
    const [x0, y0] = way[step - 1];
    const [x1, y1] = way[step];
    const lean = Math.max(16, Math.abs(y1 - y0) * 0.5) * turn;
    path += `C${x0},${y0 + lean} ${x1},${y1 - lean} ${x1},${y1}`;
  }
  return path;
}

function place() {
  world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
  canvas.style.backgroundPosition = `${view.x}px ${view.y}px`;
  // names stay legible from afar: they take the room of the line below them
  const name = Math.min(27, Math.max(14, 9.6 / view.scale));
  world.style.setProperty("--name", `${name}px`);
  world.style.setProperty("--stroke", Math.min(5, Math.max(1.4, 0.8 / view.scale)));
  canvas.classList.toggle("far", name > 17);
}

function zoomAt(x, y, factor) {
  view.whole = false;
  const scale = Math.min(LIMITS.most, Math.max(LIMITS.least, view.scale * factor));
  view.x = x - (x - view.x) * (scale / view.scale);
  view.y = y - (y - view.y) * (scale / view.scale);
  view.scale = scale;
  place();
}

function zoomMiddle(factor) {
  zoomAt(canvas.clientWidth / 2, canvas.clientHeight / 2, factor);
}

function bounds(cells) {
  const box = { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
  for (const cell of cells) {
    box.left = Math.min(box.left, cell.x - CELL.width / 2);
    box.right = Math.max(box.right, cell.x + CELL.width / 2);
    box.top = Math.min(box.top, cell.y - CELL.height / 2);
    box.bottom = Math.max(box.bottom, cell.y + CELL.height / 2);
  }
  return box;
}

function fit() {
  if (!CELLS.size || canvas.hidden) return;
  const box = bounds(CELLS.values());
  const margin = 34;
  const [width, height] = [canvas.clientWidth - 2 * margin, canvas.clientHeight - 2 * margin - 14];
  const scale = Math.min(width / (box.right - box.left), height / (box.bottom - box.top), 1.15);
  view.whole = true;
  view.scale = Math.max(LIMITS.least, scale);
  view.x = canvas.clientWidth / 2 - ((box.left + box.right) / 2) * view.scale;
  view.y = canvas.clientHeight / 2 - ((box.top + box.bottom) / 2) * view.scale - 7;
  place();
}

// Moves only when the cell is out of sight or too small to read.
function bringIntoView(cell) {
  if (canvas.hidden) return;
  const x = cell.x * view.scale + view.x;
  const y = cell.y * view.scale + view.y;
  const inside = x > 110 && y > 50 && x < canvas.clientWidth - 110 && y < canvas.clientHeight - 60;
  if (inside && view.scale >= 0.3) return;
  view.whole = false;
  view.scale = Math.max(view.scale, 0.75);
  view.x = canvas.clientWidth / 2 - cell.x * view.scale;
  view.y = canvas.clientHeight / 2 - cell.y * view.scale;
  place();
}

function listenToPointers() {
  new ResizeObserver(() => view.whole && fit()).observe(canvas);
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
  document.getElementById("cells").addEventListener("focusin", (event) => {
    if (event.target.matches(":focus-visible")) bringIntoView(CELLS.get(event.target.dataset.cell));
  });
  canvas.addEventListener("click", (event) => {
    if (moved > 3 && event.detail) return; // it was a drag; a key's click has no detail
    const card = event.target.closest(".cell");
    if (card) choose(card.dataset.cell);
    else if (!event.target.closest("#zoom")) choose(null);
  });
}
