// Views, and the fetch of the one that is seen: the next begins after the last has ended, none while hidden.

const PAUSES = { map: 2000, policy: 10000, nodes: 5000, inside: 5000 };
const VIEWS = ["map", "policy", "nodes", "inside"];
const cluster = document.documentElement.dataset.scope === "cluster";
let view = "map";
let insideOf = "";
let timer = 0;
let running = false;

// Nodes of a cluster that did not answer; the others are shown.
function noteProblems(found) {
  const list = Object.entries(found || {});
  const place = document.getElementById("problems");
  place.hidden = !list.length;
  place.replaceChildren(...list.slice(0, 3).map(([node, text]) => make("p", null, make("b", null, node || "cluster"), ` ${text}`)),
    ...(list.length > 3 ? [make("p", null, `and ${counted(list.length - 3, "more node")}`)] : []));
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

async function showMap() {
  const found = await get("flows");
  if (view !== "map" || pressed) return;
  flows = found;
  noteProblems(found.problems);
  drawMap();
  if (chosen && !panel.hidden && !panel.contains(document.activeElement)) {
    const top = panel.scrollTop;
    showParty();
    panel.scrollTop = top;
  }
  const rate = found.edges.reduce((all, edge) => all + edge.rate + edge.deniedRate, 0);
  const inside = found.parties.filter((party) => party.group);
  const outside = found.parties.length - inside.length;
  const denied = sum(found.edges.map((edge) => sum(edge.denied)));
  const notes = [denied ? `${denied} denied` : "", found.more ? `and ${counted(found.more, "more edge")}` : "", found.missed ? `${found.missed} flows missed` : ""];
  document.getElementById("summary").textContent = [`${counted(inside.length, "workload")} in ${counted(new Set(inside.map((party) => party.group)).size, "namespace")}`, outside ? `${outside} outside` : "", perSecond(rate), ...notes].filter(Boolean).join(" · ");
}

function showInsideOf(node) {
  document.getElementById("inside").replaceChildren();
  insideOf = node;
  switchTo("inside");
}

async function showInside() {
  const section = document.getElementById("inside");
  const of = () => (cluster ? `?node=${encodeURIComponent(insideOf)}` : "");
  if (section.firstChild) {
    const node = insideOf;
    const health = await get(`health${of()}`);
    if (node === insideOf) section.firstChild?.contentWindow.showHealth?.(health);
    return;
  }
  if (cluster && !insideOf) {
    insideOf = Object.keys((await get("nodes")).views)[0] || "";
    if (!insideOf) throw new Error("no agent answers");
  }
  const frame = make("iframe", { src: `inside${of()}`, title: "Modules of the agent, and its start" });
  frame.addEventListener("load", () => {
    const theme = document.documentElement.dataset.theme;
    if (theme) frame.contentDocument.documentElement.dataset.theme = theme;
  });
  section.append(frame);
}

async function update() {
  clearTimeout(timer);
  if (running || document.hidden) return;
  running = true;
  const now = view;
  const trouble = document.getElementById("trouble");
  try {
    await { map: showMap, policy: showPolicy, nodes: showNodes, inside: showInside }[now]();
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = `${error.message === "Failed to fetch" ? "hive ui has ended" : error.message}; trying again`;
    trouble.hidden = false;
  }
  running = false;
  if (now !== view) update();
  else if (PAUSES[view]) timer = setTimeout(update, PAUSES[view]);
}

function switchTo(wanted) {
  view = wanted;
  for (const one of VIEWS) {
    document.getElementById(one).hidden = one !== view;
    const tab = document.getElementById(`show-${one}`);
    tab.setAttribute("aria-selected", String(one === view));
    tab.tabIndex = one === view ? 0 : -1;
  }
  document.getElementById("finder").hidden = view !== "map";
  [chosen, pointed] = [null, null];
  closePanel();
  document.getElementById("summary").textContent = "";
  noteProblems(null);
  update();
}

for (const one of VIEWS) document.getElementById(`show-${one}`).addEventListener("click", () => switchTo(one));
document.querySelector("nav").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  switchTo(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length]);
  document.getElementById(`show-${view}`).focus();
});
for (const id of ["from", "to"]) document.getElementById(id).addEventListener("change", update);
document.getElementById("theme").addEventListener("click", () => {
  const theme = switchTheme();
  const frame = document.querySelector("#inside iframe");
  if (frame?.contentDocument) frame.contentDocument.documentElement.dataset.theme = theme;
});
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") choose(null);
  if (event.key === "/" && view === "map" && !event.target.matches("input, select")) {
    event.preventDefault();
    search.focus();
  }
});
const map = document.getElementById("map");
for (const kind of ["pointerover", "focusin"]) map.addEventListener(kind, point);
map.addEventListener("pointerleave", point);
addEventListener("pointerdown", () => { pressed = true; });
for (const kind of ["pointerup", "pointercancel", "blur"]) addEventListener(kind, () => setTimeout(() => { pressed = false; }));
document.getElementById("fold-all").addEventListener("click", () => {
  if (!flows) return;
  const groups = new Set(flows.parties.map((party) => party.group));
  const fold = ![...groups].every(isFolded);
  for (const group of groups) folds.set(group, fold);
  columns = null;
  drawMap();
});
document.getElementById("denied-only").addEventListener("click", () => {
  setDeniedOnly(!deniedOnly);
  if (flows) drawMap();
});
addEventListener("resize", () => { if (flows && view === "map") drawMap(); });
document.addEventListener("visibilitychange", update);
switchTo("map");
