// What the page does: choosing a cell, searching, switching views.

const search = document.getElementById("search");
const results = document.getElementById("results");
const SHOWN = 60; // results listed; all of them are marked in the drawing
let chosen = null;
let showAgain = () => {}; // shows the panel's contents anew

// Chooses a cell by id and, in its panel, one item of it; null chooses nothing. Brings it into view unless still.
function choose(id, item, still = false) {
  const cell = id ? CELLS.get(id) : undefined;
  chosen = cell;
  showAgain = () => choose(id, item);
  mark(cell ? new Set() : null);
  canvas.classList.toggle("chosen", Boolean(cell));
  for (const [name, card] of cards) {
    card.classList.toggle("chosen", name === id);
    card.classList.toggle("needs", Boolean(cell) && cell.needs.has(name));
    card.classList.toggle("users", Boolean(cell) && cell.users.has(name));
  }
  for (const [name, chip] of chips) chip.classList.toggle("chosen", name === item);
  for (const arrow of arrowPaths) {
    arrow.path.classList.toggle("needs", arrow.from === id);
    arrow.path.classList.toggle("users", arrow.to === id);
  }
  for (const row of document.querySelectorAll(".row")) row.classList.toggle("chosen", row.dataset.hook === item);
  if (cell) {
    showPanel(cell, item);
    if (!still) bringIntoView(cell);
  } else {
    panel.hidden = true;
  }
  drawFine(item);
  history.replaceState(null, "", cell ? `#${encodeURIComponent(id)}` : location.pathname);
}

// Chooses what the hive gives or a table: marks every cell that uses it, and lists them.
function chooseType(type) {
  choose(null);
  const use = USES.get(type);
  showAgain = () => chooseType(type);
  mark(new Set([...use.users, ...(use.provider ? [use.provider] : [])].map((node) => node.module)));
  showType(use);
}

// Marks these cells, as a search does; an empty set or null marks none.
function mark(cells) {
  canvas.classList.toggle("searching", Boolean(cells && cells.size));
  for (const [id, card] of cards) card.classList.toggle("match", Boolean(cells) && cells.has(id));
}

// Everything a person may look for: text in lower case, and where it leads.
function makeIndex() {
  const entries = [];
  const add = (kind, name, cell, item, more = "") => entries.push({
    kind, name, cell, item, text: `${name} ${more}`.toLowerCase(),
  });
  for (const cell of CELLS.values()) {
    add("cell", cell.name, cell.id, null, `${cell.id} ${cell.title}`);
    for (const node of cell.constructors) {
      if (node.kind !== "config") add("type", node.provides, cell.id, node.id, node.name);
    }
    for (const node of cell.invokes) add("invoke", node.name, cell.id, node.id);
    for (const setting of cell.settings) add("setting", setting.name, cell.id, `setting ${setting.name}`, setting.value);
    for (const hook of cell.hooks) add("hook", hook.name, cell.id, hook.id);
  }
  for (const use of USES.values()) {
    const where = `used in ${counted(new Set(use.users.map((node) => node.module)).size, "module")}`;
    if (use.kind === "hive") entries.push({ kind: "hive", name: use.type, cell: where, use, text: use.type.toLowerCase() });
  }
  return entries;
}

function drawHealth() {
  for (const [id, card] of cards) {
    for (const level of ["ok", "degraded"]) card.classList.toggle(level, CELLS.get(id).health === level);
  }
  const known = [...CELLS.values()].some((cell) => cell.health);
  for (const mark of document.querySelectorAll("#legend .health")) mark.hidden = !known;
}

// The health of now, from a page around this one; what the panel shows of the chosen cell follows.
function showHealth(health) {
  const before = chosen?.reports.join();
  takeHealth(health);
  drawHealth();
  if (chosen && before !== chosen.reports.join() && !panel.contains(document.activeElement)) showPanel(chosen);
}

const INDEX = makeIndex();

function find(words) {
  const found = INDEX.filter((entry) => words.every((word) => entry.text.includes(word)));
  const first = words.join(" ");
  const rank = (entry) => {
    const name = entry.name.toLowerCase();
    return name === first ? 0 : name.startsWith(first) ? 1 : name.includes(first) ? 2 : 3;
  };
  return found.sort((a, b) => rank(a) - rank(b));
}

function showResults() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? find(words) : [];
  const matching = new Set(found.filter((entry) => !entry.use).map((entry) => entry.cell));
  mark(matching);
  canvas.classList.toggle("searching", words.length > 0);
  document.getElementById("found").textContent = words.length ? `${matching.size} of ${CELLS.size} cells` : "";
  results.hidden = !words.length || !found.length;
  results.replaceChildren(...found.slice(0, SHOWN).map((entry, index) => make("li", null, make("button", {
    class: index === 0 ? "first" : null, onclick: () => takeResult(entry),
  }, make("small", null, entry.kind), make("b", null, entry.name), make("em", null, entry.cell)))));
  return found;
}

function takeResult(entry) {
  search.value = "";
  showResults();
  search.blur();
  if (entry.use) chooseType(entry.use.type);
  else choose(entry.cell, entry.item);
}

// What the hive gives and the tables, to ask who uses them.
function listUses() {
  const select = document.getElementById("uses");
  for (const [kind, label] of [["hive", "Given by the hive"], ["table", "Tables"]]) {
    const found = [...USES.values()].filter((use) => use.kind === kind).sort((a, b) => a.type.localeCompare(b.type));
    if (!found.length) continue;
    select.append(make("optgroup", { label }, ...found.map((use) => make("option", { value: use.type },
      `${use.type} (${use.users.length})`))));
  }
  select.hidden = !USES.size;
  select.addEventListener("change", () => {
    if (select.value) chooseType(select.value);
    select.value = "";
  });
}

function switchTo(start) {
  document.getElementById("start").hidden = !start;
  canvas.hidden = start;
  document.getElementById("legend").hidden = start;
  document.getElementById("show-start").setAttribute("aria-selected", String(start));
  document.getElementById("show-cells").setAttribute("aria-selected", String(!start));
  if (!start && chosen) bringIntoView(chosen);
}

function listenToKeys() {
  search.addEventListener("input", showResults);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      const [first] = showResults();
      if (first) takeResult(first);
    } else if (event.key === "Escape") {
      search.value = "";
      showResults();
      search.blur();
    }
    event.stopPropagation();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape") choose(null);
    else if (event.key === "0") fit();
    else if (event.key === "+" || event.key === "=") zoomMiddle(1.3);
    else if (event.key === "-") zoomMiddle(1 / 1.3);
  });
}

function listenToButtons() {
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  on("closer", () => zoomMiddle(1.3));
  on("farther", () => zoomMiddle(1 / 1.3));
  on("fit", () => fit());
  on("show-cells", () => switchTo(false));
  on("show-start", () => switchTo(true));
  on("all-arrows", (event) => canvas.classList.toggle("all-arrows", event.target.checked));
  on("theme", switchTheme);
}

function summary() {
  const built = GRAPH.constructors.filter((node) => node.built && !(node.kind in WHY)).length;
  return [counted([...CELLS.values()].filter((cell) => !cell.missing).length, "cell"), `${built} of ${counted(GRAPH.constructors.filter((node) => !(node.kind in WHY)).length, "constructor")} needed`,
    counted(GRAPH.settings.length, "setting"), counted(GRAPH.hooks.length, "hook")].join(" · ");
}

listUses();
document.getElementById("summary").textContent = summary();
document.getElementById("views").hidden = !DATA.timeline;
draw();
drawHealth();
if (FAULTS.length) {
  const faults = document.getElementById("faults");
  faults.textContent = counted(FAULTS.length, "fault");
  faults.hidden = false;
  faults.addEventListener("click", () => {
    choose(null);
    showFaults();
  });
}
drawStart();
listenToPointers();
listenToKeys();
listenToButtons();
if (location.hash) choose(decodeURIComponent(location.hash.slice(1)));
