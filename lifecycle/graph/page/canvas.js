// The drawing: cells and arrows on a plane that pans and zooms. From afar a cell is its name; nearer, what it
// is for; inside it, its constructors; and close up, their places and hooks.

const canvas = document.getElementById("canvas");
const world = document.getElementById("world");
const arrowLayer = document.getElementById("arrows");
const LETTERS = 36; // of names from afar, at the scale 1: the most
const LEGIBLE = 11; // pixels of their letters in the window at first, unless there are too many cells
const view = { x: 0, y: 0, scale: 1, letters: LETTERS, whole: true }; // whole: all is shown, and stays so when the window changes
const LIMITS = { least: 0.04, most: 12 };
const LEVELS = { near: 0.5, inside: 2.4, close: 5 }; // the scale from which on more is shown
const INSIDE = 0.22; // how much smaller what is inside a cell is drawn
const cards = new Map();
const chips = new Map(); // constructors and hooks inside the cells, by id
let arrowPaths = [];

function draw() {
  const layer = document.getElementById("cells");
  numberCircles(CELLS);
  for (const cell of CELLS.values()) {
    const card = makeCard(cell);
    cards.set(cell.id, card);
    layer.append(card);
  }
  for (const [id, card] of cards) {
    const [head, inside] = [card.querySelector(".head"), card.querySelector(".inside")];
    CELLS.get(id).height = Math.ceil(Math.max(head.offsetHeight, 6 + inside.offsetHeight * INSIDE)) + 2;
  }
  view.letters = makeRoomForNames();
  layer.style.setProperty("--fit", `${view.letters}px`);
  const arrows = layOut(CELLS);
  for (const [id, card] of cards) {
    const cell = CELLS.get(id);
    card.style.left = `${cell.x - CELL.width / 2}px`;
    card.style.top = `${cell.y - cell.height / 2}px`;
    card.style.height = `${cell.height}px`;
  }
  arrowPaths = arrows.map((arrow) => {
    const [from, to] = [CELLS.get(arrow.from), CELLS.get(arrow.to)];
    const path = addPath(arrowLayer, curve(arrow.points, to.height / 2, from.height / 2));
    path.classList.toggle("extra", arrow.extra);
    path.classList.toggle("order", from.needs.get(to.id).every((edge) => edge.order));
    path.classList.toggle("circle", from.circle > 0 && from.circle === to.circle);
    path.classList.toggle("fault", from.needs.get(to.id).some((edge) => FAULTY_EDGES.has(`${edge.from} ${edge.to}`)));
    return { ...arrow, path };
  });
  fit();
}

// The size of all names from afar, in which the longest word fits a card; each card is as high as its name needs.
function makeRoomForNames() {
  const room = CELL.width - 18;
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = `640 100px ${getComputedStyle(document.body).fontFamily}`;
  const widthOf = (text) => measure.measureText(text).width / 100;
  const wordsOf = (cell) => (cell.circle ? `${cell.name} ↻` : cell.name).split(/(?<=[-._])/);
  const longest = Math.max(...[...CELLS.values()].flatMap(wordsOf).map(widthOf));
  const letters = Math.min(LETTERS, Math.floor(room / longest));
  for (const cell of CELLS.values()) {
    let [lines, used] = [1, 0];
    for (const width of wordsOf(cell).map(widthOf)) {
      if (used && (used + width) * letters > room) [lines, used] = [lines + 1, 0];
      used += width;
    }
    cell.height = Math.max(cell.height, Math.ceil(lines * letters * 1.1) + 6);
  }
  return letters;
}

function makeCard(cell) {
  const faulty = cell.missing || [...cell.constructors, ...cell.invokes].some((node) => FAULTY.has(node.id));
  const kinds = {
    root: cell.invokes.length, unused: isUnused(cell), circle: cell.circle, fault: faulty, missing: cell.missing,
  };
  return make("div", {
    class: ["cell", ...Object.keys(kinds).filter((kind) => kinds[kind])].join(" "),
    role: "button",
    tabindex: "0",
    "data-cell": cell.id,
    title: `${cell.id}${cell.title ? `: ${cell.title}` : ""}`,
    style: `width:${CELL.width}px;--hue:${cell.hue}`,
  },
  make("div", { class: "head" }, make("b", null, ...breakable(cell.name)),
    make("span", { class: "contents" }, contents(cell)),
    cell.title ? make("span", { class: "title" }, cell.title) : null),
  make("div", { class: "inside", style: `width:${(CELL.width - 18) / INSIDE}px;transform:scale(${INSIDE})` },
    make("h4", null, cell.name, make("small", null, ` ${cell.title}`)),
    make("div", { class: "chips" }, ...[...cell.constructors, ...cell.invokes].map(makeChip))));
}

// Where a name may go on in a second line.
function breakable(name) {
  return name.split(/(?<=[-._])/).flatMap((word, at) => (at ? [make("wbr"), word] : [word]));
}

function makeChip(node) {
  const invoked = !node.provides;
  const label = labelOf(node);
  const words = [...(FAULTY.get(node.id) || [])];
  const hooks = (HOOKS_OF.get(node.id) || []).map((hook) => {
    const line = make("li", { class: "hook", "data-hook": hook.id, title: `hook: ${hook.name}` }, hook.name);
    chips.set(hook.id, line);
    return line;
  });
  const chip = make("div", {
    class: `chip ${invoked ? "invoke" : node.kind}${node.built === false && !invoked ? " unused" : ""}${
      node.private ? " private" : ""}${words.length || CELLS.get(node.module)?.missing ? " fault" : ""}`,
    "data-node": node.id,
    title: node.id,
  }, make("b", null, ...breakable(label)),
  words.length ? make("em", null, words.join(", ")) : null,
  make("small", null, [invoked ? "invoked" : node.kind === "provide" ? "" : node.kind,
    label === node.name || invoked ? "" : `from ${node.name}`].filter(Boolean).join(" ")),
  make("small", { class: "place" }, placeOf(node)),
  hooks.length ? make("ul", null, ...hooks) : null);
  chips.set(node.id, chip);
  return chip;
}

function isUnused(cell) {
  const live = cell.constructors.some((node) => node.built);
  return !live && !cell.invokes.length && cell.constructors.length > 0;
}

function contents(cell) {
  const provided = cell.constructors.filter((node) => node.kind !== "config" && !node.replaced).length;
  const parts = [];
  if (cell.missing) return "needed, and not there";
  if (provided) parts.push(`provides ${provided}`);
  if (cell.settings.length) parts.push(`sets ${cell.settings.length}`);
  if (cell.hooks.length) parts.push(counted(cell.hooks.length, "hook"));
  return parts.join(" · ");
}

function addPath(layer, d) {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", d);
  layer.append(path);
  return path;
}

// From the lower edge of what is needed, through the bends, to the upper edge of what needs it. A pair that
// stands the other way round (a cycle between modules) is drawn between the facing edges.
function curve(points, halfOfFirst, halfOfLast) {
  const way = points.map(([x, y]) => [x, y]);
  const last = way.length - 1;
  const turn = way[0][1] <= way[last][1] ? 1 : -1;
  way[0][1] += turn * (halfOfFirst + 1);
  way[last][1] -= turn * halfOfLast;
  let path = `M${way[0][0]},${way[0][1]}`;
  for (let step = 1; step < way.length; step++) {
    const [x0, y0] = way[step - 1];
    const [x1, y1] = way[step];
    const lean = Math.max(16, Math.abs(y1 - y0) * 0.5) * turn;
    path += `C${x0},${y0 + lean} ${x1},${y1 - lean} ${x1},${y1}`;
  }
  return path;
}

// The arrows of one constructor or hook, from and to those inside the cells.
function drawFine(id) {
  const layer = document.getElementById("fine");
  layer.replaceChildren();
  if (!chips.has(id)) return;
  const hook = HOOKS.get(id);
  const pairs = hook
    ? [...hook.after.map((need) => [id, need, "needs"]),
      ...GRAPH.hooks.filter((one) => one.after.includes(id)).map((one) => [one.id, id, "users"])]
    : [...(NEEDS.get(id) || []).map((edge) => [id, edge.to, "needs", edge.order]),
      ...(USERS.get(id) || []).map((edge) => [edge.from, id, "users", edge.order])];
  for (const [from, to, kind, order] of pairs) {
    if (!chips.has(from) || !chips.has(to)) continue;
    const [a, b] = [boxOf(chips.get(from)), boxOf(chips.get(to))];
    const upward = b.y + b.height / 2 <= a.y + a.height / 2;
    const start = [b.x + b.width / 2, upward ? b.y + b.height : b.y];
    const end = [a.x + a.width / 2, upward ? a.y : a.y + a.height];
    const lean = Math.max(6, Math.abs(end[1] - start[1]) * 0.4) * (upward ? 1 : -1);
    const d = `M${start}C${start[0]},${start[1] + lean} ${end[0]},${end[1] - lean} ${end}`;
    const path = addPath(layer, d);
    path.classList.add(FAULTY_EDGES.has(`${from} ${to}`) ? "fault" : kind);
    path.classList.toggle("order", Boolean(order));
  }
}

// Where an element is on the plane.
function boxOf(element) {
  const [box, origin] = [element.getBoundingClientRect(), canvas.getBoundingClientRect()];
  return {
    x: (box.left - origin.left - view.x) / view.scale,
    y: (box.top - origin.top - view.y) / view.scale,
    width: box.width / view.scale,
    height: box.height / view.scale,
  };
}

function place() {
  world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
  canvas.style.backgroundPosition = `${view.x}px ${view.y}px`;
  // names stay legible from afar: they take the room of the lines below them
  world.style.setProperty("--name", `${Math.min(60, Math.max(16, 12 / view.scale))}px`);
  world.style.setProperty("--stroke", Math.min(4, 1.15 / view.scale));
  world.style.setProperty("--px", `${Math.min(3, 1 / view.scale)}px`);
  const level = levelOf(view.scale);
  for (const name of ["far", ...Object.keys(LEVELS)]) canvas.classList.toggle(name, name === level);
  document.getElementById("level").textContent = {
    far: "modules", near: "modules", inside: "constructors", close: "hooks",
  }[level];
}

function levelOf(scale) {
  if (scale < LEVELS.near) return "far";
  return scale < LEVELS.inside ? "near" : scale < LEVELS.close ? "inside" : "close";
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
    box.top = Math.min(box.top, cell.y - cell.height / 2);
    box.bottom = Math.max(box.bottom, cell.y + cell.height / 2);
  }
  return box;
}

function fit() {
  if (!CELLS.size || canvas.hidden) return;
  const box = bounds(CELLS.values());
  const margin = 16;
  const [width, height] = [canvas.clientWidth - 2 * margin, canvas.clientHeight - 2 * margin];
  const scale = Math.min(width / (box.right - box.left), height / (box.bottom - box.top), 1.15);
  view.whole = true;
  const legible = CELLS.size < MANY ? Math.min(1.15, LEGIBLE / view.letters) : 0;
  view.scale = Math.max(LIMITS.least, legible, scale);
  view.x = canvas.clientWidth / 2 - ((box.left + box.right) / 2) * view.scale;
  const below = (box.bottom - box.top) * view.scale - height;
  view.y = margin - Math.min(0, below) / 2 - box.top * view.scale; // the sources are in sight in any case
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
  view.scale = Math.max(view.scale, LEVELS.near);
  view.x = canvas.clientWidth / 2 - cell.x * view.scale;
  view.y = canvas.clientHeight / 2 - cell.y * view.scale;
  place();
}

// A double click goes one level deeper: to all constructors of a cell, then closer to where it was.
function enter(cell, x, y) {
  if (view.scale >= LEVELS.inside) {
    zoomAt(x, y, 2);
    return;
  }
  const scale = Math.max(LEVELS.inside, (canvas.clientWidth - 40) / CELL.width);
  const middle = Math.min(canvas.clientHeight / 2, 60 + (cell.height / 2) * scale);
  Object.assign(view, { whole: false, scale, x: canvas.clientWidth / 2 - cell.x * scale, y: middle - cell.y * scale });
  place();
}
