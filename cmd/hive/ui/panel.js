// What stands at the side of the map: of a workload or namespace its partners, and the search.

const FOUND = 12; // results
let answers = new Map(); // what was asked about edges of the chosen one: the panel is drawn again with every fetch
const spread = new Set(); // pairs of namespaces of which the workloads are shown
const panel = document.getElementById("panel");
const search = document.getElementById("search");
const results = document.getElementById("results");

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
  const group = groupOf(chosen);
  const whole = chosen === `${group}/`;
  const here = (edge, end) => covers(chosen, flows.parties[edge[end]]);
  const section = (title, edges, other) => (edges.length ? [make("h3", { class: "quiet" }, title),
    ...(whole ? groupItems(edges, other) : edges.map((edge) => edgeItem(edge, flows.parties[edge[other]])))] : []);
  const within = flows.edges.filter((edge) => whole && here(edge, "from") && here(edge, "to"));
  const out = flows.edges.filter((edge) => here(edge, "from") && !within.includes(edge));
  const into = flows.edges.filter((edge) => here(edge, "to") && !within.includes(edge));
  fillPanel(make("h2", null, whole ? groupName(group) : chosen.slice(group.length + 1)),
    make("p", { class: "quiet" }, whole ? counted(flows.parties.filter((one) => one.group === group).length, group ? "workload" : "peer") : groupName(group)),
    ...section("Sends to", out, "to"), ...section("Receives from", into, "from"), ...section("Within", within, "to"));
  if (!document.getElementById("map").hidden) drawLines();
}

// Edges with another namespace as one, with what they consist of.
function groupItems(edges, other) {
  const byGroup = [...grouped(edges, (edge) => flows.parties[edge[other]].group)].map(([group, found]) => [group, merged(found), found]);
  byGroup.sort(([, a], [, b]) => Boolean(sum(b.denied)) - Boolean(sum(a.denied)) || flowsOf(b) - flowsOf(a));
  return byGroup.map(([group, all, found]) => {
    const name = `${chosen} ${other} ${group}`;
    const toggle = (event) => (event.target.open ? spread.add(name) : spread.delete(name));
    found.sort((a, b) => Boolean(sum(b.denied)) - Boolean(sum(a.denied)) || flowsOf(b) - flowsOf(a));
    return make("div", { class: "edge" }, make("h3", null, link(`${group}/`, groupName(group))), spark(all), ...figures(all),
      make("details", { open: spread.has(name) || null, ontoggle: toggle }, make("summary", null, counted(found.length, "pair")),
        make("ul", null, ...found.slice(0, 50).map((edge) => {
          const [from, to] = endsOf(edge);
          return make("li", null, link(keyOf(from), from.name), " → ", link(keyOf(to), to.name), ` ${perSecond(edge.rate)}`,
            sum(edge.denied) ? make("span", { class: "denied-text" }, ` ✕ ${sum(edge.denied)}`) : null);
        }), found.length > 50 ? make("li", { class: "quiet" }, `and ${found.length - 50} more`) : null)));
  });
}

function merged(edges) {
  const added = (name) => edges[0][name].map((_, at) => sum(edges.map((edge) => edge[name][at])));
  const counts = (name) => {
    const all = new Map();
    for (const edge of edges) for (const [what, count] of edge[name]) all.set(what, (all.get(what) || 0) + count);
    return [...all].sort((a, b) => b[1] - a[1]);
  };
  const ports = counts("ports");
  return {
    allowed: added("allowed"), denied: added("denied"), rate: sum(edges.map((edge) => edge.rate)), deniedRate: sum(edges.map((edge) => edge.deniedRate)),
    ports: ports.slice(0, 8), morePorts: Math.max(0, ports.length - 8, ...edges.map((edge) => edge.morePorts)), reasons: counts("reasons"),
  };
}

const link = (key, text) => make("button", { class: "link", onclick: () => goTo(key) }, text);

function figures(edge) {
  return [make("p", null, `${perSecond(edge.rate)} allowed`, sum(edge.denied) ? make("span", { class: "denied-text" },
    `, ${perSecond(edge.deniedRate)} denied: ${edge.reasons.map(([reason, count]) => `${reason} ${count}`).join(", ")}`) : null),
  make("p", { class: "quiet" }, edge.ports.map(([port, count]) => `${port} × ${count}`).join(", "),
    edge.morePorts ? ` and ${edge.morePorts} more` : "")];
}

function edgeItem(edge, other) {
  const asked = JSON.stringify(edge.ask);
  const why = answers.get(asked) || make("div");
  const ask = () => {
    answers.set(asked, why);
    explain(edge.ask, why);
  };
  return make("div", { class: "edge" },
    make("h3", null, link(keyOf(other), `${other.group ? `${other.group}/` : ""}${other.name}`)), spark(edge), ...figures(edge),
    edge.ask ? make("button", { class: "link why", onclick: ask }, "which policy decides?") : null, why);
}

// Five minutes of flows, ten seconds each.
function spark(edge) {
  const svg = drawing("svg", { class: "spark", viewBox: `0 0 ${edge.allowed.length * 4} 30`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${sum(edge.allowed)} flows allowed, ${sum(edge.denied)} denied in five minutes` });
  const most = Math.max(1, ...edge.allowed.map((count, at) => count + edge.denied[at]));
  edge.allowed.forEach((count, at) => {
    let top = 30;
    for (const [value, kind] of [[count, "allowed"], [edge.denied[at], "denied"]]) {
      const height = (29 * value) / most;
      top -= height;
      svg.append(drawing("rect", { x: at * 4, y: top, width: 3, height, class: kind }));
    }
  });
  return svg;
}

// Namespaces and workloads that have all these words, those with names that begin with them first.
function showResults() {
  const typed = search.value.toLowerCase().trim();
  const words = typed.split(/\s+/).filter(Boolean);
  const groups = new Set(flows?.parties.map((party) => party.group));
  const entries = words.length && flows ? [
    ...[...groups].map((group) => ({ key: `${group}/`, name: groupName(group), where: "namespace" })),
    ...flows.parties.map((party) => ({ key: keyOf(party), name: party.name, where: groupName(party.group) })),
  ].filter((one) => words.every((word) => `${one.key} ${one.where}`.toLowerCase().includes(word))) : [];
  const rank = (one) => (one.name.toLowerCase() === typed ? 0 : one.name.toLowerCase().startsWith(typed) ? 1 : 2);
  entries.sort((a, b) => rank(a) - rank(b) || (a.key < b.key ? -1 : 1));
  const left = entries.length - FOUND;
  results.hidden = !words.length;
  results.replaceChildren(...entries.slice(0, FOUND).map((one, at) => make("li", null, make("button", {
    class: at ? null : "first", onclick: () => takeResult(one),
  }, make("b", null, one.name), make("small", null, one.where)))),
  ...(left > 0 ? [make("li", { class: "quiet" }, `and ${left} more`)] : []), ...(entries.length ? [] : [make("li", { class: "quiet" }, "nothing has this name")]));
  return entries;
}

function takeResult(one) {
  search.value = "";
  showResults();
  goTo(one.key);
}

search.addEventListener("input", showResults);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault(); // or the button that gets the focus is pressed
    const [first] = showResults();
    if (first) takeResult(first);
  } else if (event.key === "Escape") {
    search.value = "";
    showResults();
    search.blur();
  } else if (event.key === "ArrowDown") {
    event.preventDefault();
    results.querySelector("button")?.focus();
  }
  event.stopPropagation();
});
results.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") results.hidden = true;
  if (!step) return;
  event.preventDefault();
  const all = [...results.querySelectorAll("button")];
  (all[all.indexOf(event.target) + step] || search).focus();
});
