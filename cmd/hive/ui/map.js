// The map: a card for each namespace, folded where there are many, and lines between them as wide as their rate.

const FEW = 40; // rows: up to so many, all namespaces are unfolded
const SHOWN = 8; // workloads of an unfolded namespace until all are asked for
const MOST_CARDS = 40; // namespaces until all are asked for
const MOST_LINES = 60; // lines, unless they are of what is pointed at or chosen
const NUMBERED = 16; // of them have their numbers written at them
const [WIDTH, GAP] = [226, 88]; // of columns, as in page.css
const REST = "\n"; // the card of namespaces that have none; no namespace has this name
let flows = null;
let many = false;
const folds = new Map(); // namespace: whether it was folded or unfolded by a click
const opened = new Set(); // namespaces of which all workloads are shown
const wanted = new Set(); // "group/name" that was searched for: shown, however little it does
let deniedOnly = false;
let allCards = false;
let columns = null; // names in columns: they stay where they are until there is a new one
let room = null; // what columns were made for
let chosen = null; // "group/name", or "group/" for all of a namespace
let pointed = null; // the same, of what has the pointer or the focus
let pressed = false; // a click is under way: nothing may be drawn anew under it

const keyOf = (party) => `${party.group}/${party.name}`;
const groupOf = (key) => key.slice(0, key.indexOf("/"));
const groupName = (group) => group || "outside the cluster";
const perSecond = (rate) => `${rate < 10 ? +rate.toFixed(2) : Math.round(rate)}/s`;
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const flowsOf = (edge) => sum(edge.allowed) + sum(edge.denied);
const endsOf = (edge) => [flows.parties[edge.from], flows.parties[edge.to]];
const edgesShown = () => (deniedOnly ? flows.edges.filter((edge) => sum(edge.denied)) : flows.edges);
const covers = (key, party) => Boolean(key) && (key === keyOf(party) || key === `${party.group}/`);
const isFolded = (group) => folds.get(group) ?? many;
const find = (attribute, value) => document.querySelector(`[data-${attribute}="${CSS.escape(value)}"]`);

// Of every workload, "group/name", and every namespace, "group/": its rate, flows, and how many were denied.
function totals(edges) {
  const found = new Map();
  for (const edge of edges) {
    for (const key of new Set(endsOf(edge).flatMap((party) => [keyOf(party), `${party.group}/`]))) {
      if (!found.has(key)) found.set(key, { rate: 0, flows: 0, denied: 0 });
      const total = found.get(key);
      total.rate += edge.rate + edge.deniedRate;
      total.flows += flowsOf(edge);
      total.denied += sum(edge.denied);
    }
  }
  return found;
}

const worseFirst = (total) => (a, b) => {
  const [one, other] = [total.get(keyOf(a)), total.get(keyOf(b))];
  return Boolean(other.denied) - Boolean(one.denied) || other.flows - one.flows || (a.name < b.name ? -1 : 1);
};

function drawMap() {
  const focused = document.activeElement?.dataset?.act;
  const edges = edgesShown();
  const seen = [...new Set(edges.flatMap(endsOf))];
  const total = totals(edges);
  const byGroup = grouped(seen, (party) => party.group);
  many ||= sum([...byGroup.values()].map((parties) => Math.min(parties.length, SHOWN) + 1)) > FEW;
  arrange(byGroup, total, edges);
  const rest = [...byGroup.keys()].filter((group) => !columns.flat().includes(group));
  document.getElementById("groups").replaceChildren(...columns.map((column) => column.filter((name) => byGroup.has(name) || (name === REST && rest.length)))
    .filter((column) => column.length).map((column) => make("div", { class: "rank" },
      ...column.map((name) => (name === REST ? restCard(rest) : groupCard(name, byGroup.get(name), total))))));
  if (!edges.length) {
    document.getElementById("groups").append(make("p", { class: "empty" }, deniedOnly && flows.edges.length
      ? "Nothing was denied in the last five minutes."
      : "No flows in the last five minutes. As soon as packets pass on this node, who sends them to whom stands here."));
  }
  document.getElementById("map").classList.toggle("chosen", Boolean(chosen && total.has(chosen)));
  document.getElementById("map").classList.toggle("many", many);
  document.getElementById("fold-all").textContent = [...byGroup.keys()].every(isFolded) ? "Unfold all" : "Fold all";
  drawLines();
  if (focused) find("act", focused)?.focus({ preventScroll: true });
}

// Gives namespaces their places, anew if there is one without.
function arrange(byGroup, total, edges) {
  const map = document.getElementById("map");
  const now = { columns: Math.max(1, Math.floor((document.querySelector("main").clientWidth - 40 + GAP) / (WIDTH + GAP))), height: map.clientHeight - 90 };
  const known = new Set(columns?.flat());
  const without = [...byGroup.keys()].filter((group) => !known.has(group));
  const weight = (group) => (total.get(`${group}/`)?.flows || 0) + 10 * (total.get(`${group}/`)?.denied || 0);
  const least = Math.min(...[...known].filter((group) => group !== REST).map(weight));
  const fits = known.has(REST) ? without.every((group) => weight(group) <= 2 * least + 100) : !without.length;
  if (columns && room.columns === now.columns && fits) return;
  room = now;
  const ranked = [...byGroup.keys()].sort((a, b) => weight(b) - weight(a) || (a < b ? -1 : 1));
  const asked = new Set([...wanted].map(groupOf));
  let cards = ranked;
  if (!allCards && ranked.length > MOST_CARDS) cards = [...ranked.slice(0, MOST_CARDS), ...ranked.slice(MOST_CARDS).filter((group) => asked.has(group)), REST];
  const carded = new Set(cards);
  const arcs = netFlows(edges, (at) => (carded.has(flows.parties[at].group) ? flows.parties[at].group : REST));
  const heightOf = (name) => (name === REST || isFolded(name) ? 66 : 76 + 41 * Math.min(byGroup.get(name).length, SHOWN));
  columns = columnsOf(cards, arcs, heightOf, room);
}

const numbers = ({ rate, denied }) => [make("small", null, perSecond(rate)), denied ? make("small", { class: "denied-text" }, `✕ ${denied}`) : null];
const inWords = ({ rate, denied }) => `${perSecond(rate)}${denied ? `, ${denied} denied` : ""}`;

function groupCard(group, parties, total) {
  const [key, folded] = [`${group}/`, isFolded(group)];
  const own = total.get(key);
  const ranked = folded ? [] : [...parties].sort(worseFirst(total));
  const shown = opened.has(group) ? ranked : ranked.filter((party, at) => at < SHOWN || wanted.has(keyOf(party)));
  const more = ranked.length - shown.length;
  shown.sort((a, b) => a.name.localeCompare(b.name));
  const fold = () => {
    folds.set(group, !folded);
    drawMap();
  };
  return make("div", { class: `group${group ? "" : " outside"}${folded ? " folded" : ""}${own.denied ? " bad" : ""}`, "data-group": group, role: "group", "aria-label": groupName(group) },
    make("div", { class: "head" },
      make("h2", null, make("button", { "data-act": `fold ${group}`, "aria-expanded": String(!folded), onclick: fold },
        make("i", { "aria-hidden": "true" }, folded ? "▸" : "▾"), make("b", null, groupName(group)), folded ? make("small", null, counted(parties.length, group ? "workload" : "peer")) : null)),
      make("button", { class: "sums", "data-act": `choose ${key}`, "aria-pressed": String(chosen === key), title: "who it talks to",
        "aria-label": `${groupName(group)}: ${inWords(own)}. Who it talks to`, onclick: () => choose(chosen === key ? null : key) }, ...numbers(own))),
    ...shown.map((party) => partyButton(party, total.get(keyOf(party)))),
    more > 0 ? make("button", { class: "more", "data-act": `more ${group}`, onclick: () => { opened.add(group); drawMap(); } }, `and ${more} more`) : null);
}

function partyButton(party, own) {
  const key = keyOf(party);
  return make("button", {
    class: `party${own.denied ? " bad" : ""}`, "data-party": key, "data-act": `choose ${key}`, "aria-pressed": String(chosen === key),
    "aria-label": `${party.name}, ${inWords(own)}`, onclick: () => choose(chosen === key ? null : key),
  }, make("b", null, party.name), make("small", own.denied ? { class: "denied-text" } : null, own.denied ? `✕ ${own.denied}` : perSecond(own.rate)));
}

function restCard(groups) {
  const open = () => {
    [allCards, columns] = [true, null];
    drawMap();
  };
  return make("div", { class: "group folded rest", "data-group": REST, role: "group", "aria-label": "other namespaces" },
    make("button", { "data-act": "rest", onclick: open }, make("b", null, `${counted(groups.length, "more namespace")}`), make("small", null, "with the least traffic: show all")));
}

// Edges between the same two cards, or workloads of unfolded ones, are one line.
function bundles() {
  const carded = new Set(columns.flat());
  const keys = new Map();
  const place = (party) => {
    const key = keyOf(party);
    if (!keys.has(key)) keys.set(key, !carded.has(party.group) ? `${REST}/` : find("party", key) ? key : `${party.group}/`);
    return keys.get(key);
  };
  const focus = chosen || pointed;
  const found = new Map();
  for (const edge of edgesShown()) {
    const [from, to] = endsOf(edge);
    const [start, end] = [place(from), place(to)];
    if (start === end) continue;
    const pair = `${start}\0${end}`;
    if (!found.has(pair)) found.set(pair, { start, end, rate: 0, allowed: 0, denied: 0, lit: false });
    const bundle = found.get(pair);
    bundle.rate += edge.rate + edge.deniedRate;
    bundle.allowed += sum(edge.allowed);
    bundle.denied += sum(edge.denied);
    bundle.lit ||= covers(focus, from) || covers(focus, to) || focus === start || focus === end;
  }
  const cardless = (one) => [one.start, one.end].includes(`${REST}/`);
  return [...found.values()].sort((a, b) => b.lit - a.lit || cardless(a) - cardless(b) || Boolean(b.denied) - Boolean(a.denied) || b.rate - a.rate || b.allowed - a.allowed);
}

function drawLines() {
  const plane = document.getElementById("plane").getBoundingClientRect();
  const boxes = new Map();
  const boxOf = (key) => {
    if (!boxes.has(key)) {
      const card = find("group", groupOf(key));
      const edge = card.getBoundingClientRect();
      const box = (find("party", key) || card.querySelector(".more") || card).getBoundingClientRect();
      boxes.set(key, { left: edge.left - plane.left, right: edge.right - plane.left, y: box.top - plane.top + box.height / 2 });
    }
    return boxes.get(key);
  };
  const all = bundles();
  const lit = all.filter((one) => one.lit);
  const drawn = all.slice(0, Math.max(MOST_LINES, lit.length));
  const taken = [...document.querySelectorAll(".group")].map((card) => {
    const box = card.getBoundingClientRect();
    return { left: box.left - plane.left, right: box.right - plane.left, top: box.top - plane.top, bottom: box.bottom - plane.top };
  });
  const numbered = new Set(lit.length ? lit : all.slice(0, NUMBERED));
  const [lines, words] = [[], []];
  for (const one of drawn) {
    const curve = curveOf(boxOf(one.start), boxOf(one.end));
    lines.push(...linesOf(one, curve));
    if (numbered.has(one)) words.push(...numberAt(one, curve, taken));
  }
  const svg = document.getElementById("lines");
  svg.classList.toggle("focused", lit.length > 0);
  svg.replaceChildren(...lines.reverse(), ...words);
  const near = new Set(lit.flatMap((one) => [one.start, one.end]));
  for (const card of document.querySelectorAll(".party")) card.classList.toggle("lit", near.has(card.dataset.party));
  for (const card of document.querySelectorAll(".group")) card.classList.toggle("lit", near.has(`${card.dataset.group}/`));
  document.getElementById("note").textContent = drawn.length < all.length
    ? `${drawn.length} of ${all.length} lines, what was denied first; point at a card for all of its` : "";
}

function drawing(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

// The four points of a curve; what comes in ends a little lower than what goes out begins.
function curveOf(from, to) {
  const [start, end] = [from.y - 5, to.y + 5];
  if (to.left > from.right) {
    const half = (to.left - from.right) / 2;
    return [[from.right, start], [from.right + half, start], [to.left - half, end], [to.left, end]];
  }
  if (to.right < from.left) {
    const half = (from.left - to.right) / 2;
    return [[from.left, start], [from.left - half, start], [to.right + half, end], [to.right, end]];
  }
  const out = Math.max(from.right, to.right) + 22 + Math.min(46, Math.abs(end - start) / 5);
  return [[from.right, start], [out, start], [out, end], [to.right, end]];
}

function linesOf(one, [start, first, second, end]) {
  const towards = end[0] > second[0] ? -1 : 1;
  const lit = one.lit ? " lit" : "";
  const bend = `M${start}C${first} ${second} ${end}`;
  const width = 1.4 + Math.min(6, 1.2 * Math.log2(1 + one.rate));
  const head = (kind) => drawing("path", { d: `M${end}l${9 * towards},-5v10z`, class: `head ${kind}${lit}` });
  return [
    head(one.allowed ? "" : "denied"),
    ...(one.denied ? [drawing("path", { d: bend, class: `denied${lit}`, "stroke-width": one.allowed ? 1.8 : Math.max(1.8, width) })] : []),
    ...(one.allowed ? [drawing("path", { d: bend, class: `allowed${lit}`, "stroke-width": width })] : []),
  ];
}

// Its numbers, where on it they hide neither a card nor other numbers.
function numberAt(one, points, taken) {
  const texts = [one.allowed || !one.denied ? perSecond(one.rate) : "", one.denied ? `✕ ${one.denied}` : ""].filter(Boolean);
  const half = (7 * texts.join(" ").length + 10) / 2;
  for (const at of [0.5, 0.35, 0.65, 0.2, 0.8, 0.1, 0.9]) {
    const parts = [(1 - at) ** 3, 3 * at * (1 - at) ** 2, 3 * at ** 2 * (1 - at), at ** 3];
    const [across, y] = [0, 1].map((axis) => sum(parts.map((part, corner) => part * points[corner][axis])));
    const back = points[1][0] === points[2][0]; // to the same column: beside the cards, however near the line is
    const x = back ? Math.max(across, points[0][0] + half + 2, points[3][0] + half + 2) : across;
    const box = { left: x - half, right: x + half, top: y - 9, bottom: y + 9 };
    if (box.top < 0 || taken.some((other) => box.left < other.right && box.right > other.left && box.top < other.bottom && box.bottom > other.top)) continue;
    taken.push(box);
    return [drawing("rect", { x: box.left, y: box.top, width: 2 * half, height: 18, rx: 9 }),
      drawing("text", { x, y: y + 4, "text-anchor": "middle" }, ...texts.map((text, place) =>
        drawing("tspan", { class: text.startsWith("✕") ? "denied" : "", dx: place ? 4 : 0 }, text)))];
  }
  return [];
}

function point(event) {
  const card = event.target.closest?.(".party, .group");
  const key = card ? card.dataset.party ?? `${card.dataset.group}/` : null;
  if (key === pointed || pressed) return;
  pointed = key;
  if (flows) drawLines();
}

function choose(key) {
  if (key !== chosen) answers = new Map();
  chosen = key;
  if (flows && view === "map") drawMap();
  if (key) showParty();
  else closePanel();
}

// Unfolds what it is in, chooses it, and scrolls to it.
function goTo(key) {
  const group = groupOf(key);
  wanted.add(key);
  if (key !== `${group}/`) folds.set(group, false);
  if (!columns.flat().includes(group)) columns = null;
  if (deniedOnly) setDeniedOnly(false);
  choose(key);
  (find("party", key) || find("group", group))?.scrollIntoView({ block: "center", inline: "center" });
  find("act", `choose ${key}`)?.focus({ preventScroll: true });
}

function setDeniedOnly(on) {
  [deniedOnly, columns] = [on, null];
  document.getElementById("denied-only").setAttribute("aria-pressed", String(on));
}
