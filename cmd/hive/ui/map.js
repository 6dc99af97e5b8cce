// The map: a card for each namespace, columns from who asks to who is asked, lines as wide as their rate.

const SHOWN = 8; // workloads of a namespace until all are asked for
const RANKS = 4;
const opened = new Set();
let flows = null;
let chosen = null; // "group/name"
let answers = new Map(); // what was asked about edges of the chosen one: the panel is drawn again with every fetch
const panel = document.getElementById("panel");

const keyOf = (party) => `${party.group}/${party.name}`;
const groupName = (group) => group || "outside the cluster";
const perSecond = (rate) => `${rate < 10 ? +rate.toFixed(2) : Math.round(rate)}/s`;
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);

// How far each namespace is from those that only ask, along what it is asked by.
function ranksOf(groups) {
  const rank = new Map(groups.map((group) => [group, 0]));
  const net = new Map();
  for (const edge of flows.edges) {
    const [from, to] = [flows.parties[edge.from].group, flows.parties[edge.to].group];
    if (from === to) continue;
    const [pair, sign] = from < to ? [`${from}\n${to}`, 1] : [`${to}\n${from}`, -1];
    net.set(pair, (net.get(pair) || 0) + sign * (1 + sum(edge.allowed) + sum(edge.denied)));
  }
  for (let round = 0; round < RANKS - 1; round++) {
    for (const [pair, weight] of net) {
      const [from, to] = weight > 0 ? pair.split("\n") : pair.split("\n").reverse();
      rank.set(to, Math.max(rank.get(to), Math.min(RANKS - 1, rank.get(from) + 1)));
    }
  }
  return rank;
}

function totals() {
  const found = new Map(flows.parties.map((party) => [keyOf(party), { rate: 0, denied: 0 }]));
  for (const edge of flows.edges) {
    for (const at of new Set([edge.from, edge.to])) {
      const total = found.get(keyOf(flows.parties[at]));
      total.rate += edge.rate + edge.deniedRate;
      total.denied += sum(edge.denied);
    }
  }
  return found;
}

function drawMap() {
  const focused = document.activeElement?.dataset?.party;
  const byGroup = grouped(flows.parties, (party) => party.group);
  const rank = ranksOf([...byGroup.keys()]);
  const total = totals();
  const columns = grouped([...byGroup.keys()].sort(), (group) => rank.get(group));
  document.getElementById("groups").replaceChildren(...[...columns.keys()].sort().map((at) =>
    make("div", { class: "rank" }, ...columns.get(at).map((group) => groupCard(group, byGroup.get(group), total)))));
  if (!flows.edges.length) {
    document.getElementById("groups").append(make("p", { class: "empty" },
      "No flows in the last five minutes. As soon as packets pass on this node, who sends them to whom stands here."));
  }
  document.getElementById("map").classList.toggle("chosen", Boolean(chosen && total.has(chosen)));
  light();
  drawLines();
  if (focused) document.querySelector(`[data-party="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function groupCard(group, parties, total) {
  const ranked = [...parties].sort((a, b) => {
    const [one, other] = [total.get(keyOf(a)), total.get(keyOf(b))];
    return Boolean(other.denied) - Boolean(one.denied) || other.rate - one.rate || a.name.localeCompare(b.name);
  });
  const shown = opened.has(group) ? ranked : ranked.slice(0, SHOWN);
  const more = ranked.length - shown.length;
  shown.sort((a, b) => a.name.localeCompare(b.name));
  return make("div", { class: `group${group ? "" : " outside"}`, "data-group": group, role: "group", "aria-label": groupName(group) },
    make("h2", null, groupName(group)),
    ...shown.map((party) => {
      const { rate, denied } = total.get(keyOf(party));
      return make("button", {
        class: `party${denied ? " bad" : ""}`, "data-party": keyOf(party), "aria-pressed": String(chosen === keyOf(party)),
        "aria-label": `${party.name}, ${perSecond(rate)}${denied ? `, ${denied} denied` : ""}`,
        onclick: () => choose(chosen === keyOf(party) ? null : keyOf(party)),
      }, make("b", null, party.name), make("small", null, denied ? `✕ ${denied}` : perSecond(rate)));
    }),
    more > 0 ? make("button", { class: "more", onclick: () => { opened.add(group); drawMap(); } }, `and ${more} more`) : null);
}

function light() {
  const near = new Set();
  for (const edge of flows.edges) {
    const ends = [keyOf(flows.parties[edge.from]), keyOf(flows.parties[edge.to])];
    if (ends.includes(chosen)) ends.forEach((one) => near.add(one));
  }
  for (const button of document.querySelectorAll(".party")) button.classList.toggle("lit", near.has(button.dataset.party));
}

// Lines between what is shown; of a workload that is not, at the card of its namespace.
function drawLines() {
  const plane = document.getElementById("plane").getBoundingClientRect();
  const place = (party) => {
    const own = document.querySelector(`[data-party="${CSS.escape(keyOf(party))}"]`);
    const box = (own || document.querySelector(`[data-group="${CSS.escape(party.group)}"] .more`)).getBoundingClientRect();
    return { left: box.left - plane.left, right: box.right - plane.left, y: box.top - plane.top + box.height / 2 };
  };
  document.getElementById("lines").replaceChildren(...flows.edges.slice(0, 600).filter((edge) => edge.from !== edge.to).map((edge) => {
    const [from, to] = [place(flows.parties[edge.from]), place(flows.parties[edge.to])];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const ends = [keyOf(flows.parties[edge.from]), keyOf(flows.parties[edge.to])];
    path.setAttribute("d", curve(from, to));
    path.setAttribute("stroke-width", String(1.4 + Math.min(6, 1.6 * Math.log2(1 + edge.rate + edge.deniedRate))));
    path.setAttribute("class", `${sum(edge.denied) ? "denied" : ""}${ends.includes(chosen) ? " lit" : ""}`);
    return path;
  }));
}

function curve(from, to) {
  if (to.left > from.right) {
    const half = (to.left - from.right) / 2;
    return `M${from.right},${from.y}C${from.right + half},${from.y} ${to.left - half},${to.y} ${to.left},${to.y}`;
  }
  if (to.right < from.left) {
    const half = (from.left - to.right) / 2;
    return `M${from.left},${from.y}C${from.left - half},${from.y} ${to.right + half},${to.y} ${to.right},${to.y}`;
  }
  const out = Math.max(from.right, to.right) + 22 + Math.min(46, Math.abs(to.y - from.y) / 5);
  return `M${from.right},${from.y}C${out},${from.y} ${out},${to.y} ${to.right},${to.y}`;
}

function choose(key) {
  if (key !== chosen) answers = new Map();
  chosen = key;
  if (flows) drawMap();
  if (key) showParty();
  else closePanel();
}

function closePanel() {
  panel.hidden = true;
  panel.replaceChildren();
  if (flows && !document.getElementById("map").hidden) drawLines();
}

function fillPanel(...contents) {
  panel.replaceChildren(make("button", { class: "close", "aria-label": "Close", onclick: () => choose(null) }, "×"),
    ...contents.filter(Boolean));
  panel.hidden = false;
}

function showParty() {
  const edges = flows.edges.filter((edge) => [edge.from, edge.to].some((at) => keyOf(flows.parties[at]) === chosen));
  const [group, ...name] = chosen.split("/");
  const section = (title, end, other) => {
    const found = edges.filter((edge) => keyOf(flows.parties[edge[end]]) === chosen);
    return found.length ? [make("h3", { class: "quiet" }, title), ...found.map((edge) => edgeItem(edge, flows.parties[edge[other]]))] : [];
  };
  fillPanel(make("h2", null, name.join("/")), make("p", { class: "quiet" }, groupName(group)),
    ...section("Sends to", "from", "to"), ...section("Receives from", "to", "from"));
  if (!document.getElementById("map").hidden) drawLines();
}

function edgeItem(edge, other) {
  const denied = sum(edge.denied);
  const asked = JSON.stringify(edge.ask);
  const why = answers.get(asked) || make("div");
  const ask = () => {
    answers.set(asked, why);
    explain(edge.ask, why);
  };
  return make("div", { class: "edge" },
    make("h3", null, `${other.group ? `${other.group}/` : ""}${other.name}`),
    spark(edge),
    make("p", null, `${perSecond(edge.rate)} allowed`, denied ? make("span", { class: "denied-text" },
      `, ${perSecond(edge.deniedRate)} denied: ${edge.reasons.map(([reason, count]) => `${reason} ${count}`).join(", ")}`) : null),
    make("p", { class: "quiet" }, edge.ports.map(([port, count]) => `${port} × ${count}`).join(", "),
      edge.morePorts ? ` and ${edge.morePorts} more` : ""),
    edge.ask ? make("button", { class: "link", onclick: ask }, "which policy decides?") : null, why);
}

// Five minutes of flows, ten seconds each.
function spark(edge) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${edge.allowed.length * 4} 30`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${sum(edge.allowed)} flows allowed, ${sum(edge.denied)} denied in five minutes`);
  const most = Math.max(1, ...edge.allowed.map((count, at) => count + edge.denied[at]));
  edge.allowed.forEach((count, at) => {
    let top = 30;
    for (const [value, kind] of [[count, "allowed"], [edge.denied[at], "denied"]]) {
      const height = (29 * value) / most;
      top -= height;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [name, to] of Object.entries({ x: at * 4, y: top, width: 3, height, class: kind })) bar.setAttribute(name, to);
      svg.append(bar);
    }
  });
  return svg;
}
