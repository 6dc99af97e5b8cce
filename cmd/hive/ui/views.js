// Who may talk to whom as a matrix, the rules that decide, and how nodes are.

const SIGNS = { allowed: "✓", denied: "✕", mixed: "◐", elsewhere: "→" };
const LABELS = ["app.kubernetes.io/name", "app", "k8s-app", "name"];
let matrixShown = "";
let explained = 0;

function endName(end) {
  if (!end.labels.some((label) => label.startsWith("k8s:"))) return end.ask;
  const networks = end.networks?.length ? ` in ${end.networks.join(", ")}` : "";
  const found = LABELS.map((key) => end.labels.find((label) => label.startsWith(`k8s:${key}=`))).find(Boolean);
  const name = found ? found.slice(found.indexOf("=") + 1) : end.pods[0]?.split("/")[1] || `identity ${end.identity}`;
  return `${end.namespace}/${name}${networks}`;
}

async function showPolicy() {
  const [from, to] = ["from", "to"].map((id) => document.getElementById(id));
  const found = await get(`policy?from=${encodeURIComponent(from.value)}&to=${encodeURIComponent(to.value)}`);
  noteProblems(found.problems);
  const text = JSON.stringify(found);
  if (text === matrixShown) return;
  matrixShown = text;
  for (const select of [from, to]) {
    const value = select.value;
    select.replaceChildren(make("option", { value: "" }, "all namespaces"),
      ...found.namespaces.map((name) => make("option", { value: name }, name)));
    select.value = value;
  }
  const left = [[found["more-sources"], "source"], [found["more-destinations"], "destination"]].filter(([count]) => count);
  document.getElementById("more").textContent = left.length
    ? `and ${left.map(([count, word]) => counted(count, word)).join(", ")} more: choose a namespace` : "";
  drawMatrix(found);
}

function drawMatrix(found) {
  const cells = new Map(found.cells.map((cell) => [`${cell.from} ${cell.to}`, cell]));
  const rows = found.sources.map((source, from) => make("tr", null,
    make("th", { scope: "row", title: endName(source) }, endName(source)),
    ...found.destinations.map((destination, to) => {
      const cell = cells.get(`${from} ${to}`);
      if (!cell) return make("td");
      const words = `${endName(source)} to ${endName(destination)}: ${cell.headline}`;
      const show = () => showRule(source, destination, words);
      return make("td", null, make("button", {
        class: cell.verdict, "aria-label": words, title: words, tabindex: "-1", "data-at": `${from} ${to}`,
        onmouseenter: show, onfocus: show,
      }, SIGNS[cell.verdict]));
    })));
  document.getElementById("matrix").replaceChildren(make("table", null,
    make("thead", null, make("tr", null, make("th", null, make("span", { class: "quiet" }, "from ╲ to")),
      ...found.destinations.map((one) => make("th", { scope: "col", title: endName(one) }, make("span", null, endName(one)))))),
    make("tbody", null, ...rows)));
  const first = document.querySelector("#matrix button");
  if (first) first.tabIndex = 0;
}

// Arrow keys go from cell to cell; the tab key leaves the matrix.
document.getElementById("matrix").addEventListener("keydown", (event) => {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!step || !event.target.dataset.at) return;
  event.preventDefault();
  let [row, column] = event.target.dataset.at.split(" ").map(Number);
  for (let far = 0; far < 200; far++) {
    [row, column] = [row + step[0], column + step[1]];
    const next = document.querySelector(`#matrix [data-at="${row} ${column}"]`);
    if (!next) continue;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    return;
  }
});

function showRule(source, destination, words) {
  const rules = make("div");
  fillPanel(make("h2", null, words), rules);
  clearTimeout(explained);
  explained = setTimeout(() => explain({ source: source.ask, destination: destination.ask }, rules), 120);
}

// The rules that decide, as `hive policy explain` shows them.
async function explain(question, into) {
  const query = Object.entries(question).filter(([, value]) => value)
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  try {
    const found = await get(`explain?${query}`);
    into.replaceChildren(...found.ways.slice(0, 12).map(wayItem),
      ...(found.ways.length > 12 ? [make("p", { class: "quiet" }, `and ${found.ways.length - 12} more`)] : []));
  } catch (error) {
    into.replaceChildren(make("p", { class: "quiet" }, error.message));
  }
}

function wayItem(way) {
  const good = way.verdict === "allowed" || way.verdict === "elsewhere";
  const lines = way.directions.flatMap((one) => [
    make("li", null, `${one.direction}: ${one.verdict}`,
      one.enforced ? "" : " (no policy selects it)",
      one.rules.length ? `, by ${one.rules.join("; ")}` : ""),
    ...one.requests.map((request) => make("li", { class: "quiet" }, `lets through ${request}`)),
    ...one.near.map((near) => make("li", { class: "quiet" }, `${near.rule}: ${near.missing}`)),
  ]);
  return make("div", null,
    make("h3", { class: good ? "allowed-text" : "denied-text" }, `${way.destination} on ${way.port}: ${way.verdict}`),
    make("ul", null, ...lines, ...way.elsewhere.map((text) => make("li", null, text)),
      ...[way.problem, way.note].filter(Boolean).map((text) => make("li", null, text))));
}

function facts(pairs) {
  return make("dl", null, ...pairs.filter(([, value]) => value).flatMap(([name, value]) =>
    [make("dt", null, name), make("dd", null, value)]));
}

function pathText(path) {
  if (!path) return "";
  const one = (kind, found) => found ? `${kind} ${found.status || milliseconds((found.latency || 0) / 1e9)}` : "";
  return [one("ICMP", path.icmp), one("HTTP", path.http)].filter(Boolean).join(", ");
}

const badPath = (path) => Boolean(path && (path.icmp?.status || path.http?.status));

// A card for each node: what its own agent has of it, and what agents of other nodes see of it.
async function showNodes() {
  const found = await get("nodes");
  noteProblems(found.problems);
  const views = Object.entries(found.views);
  const nodes = new Map();
  for (const [, view] of views) for (const node of view.nodes["nodes-added"] || []) nodes.set(node.name, node);
  const own = new Map(views.map(([, view]) => [view.nodes.self, view]));
  const short = (name) => name.slice(name.indexOf("/") + 1);
  const without = Object.entries(found.problems).filter(([name]) => name && ![...nodes.keys()].some((one) => short(one) === name));
  const order = [...nodes.values()].sort((a, b) => (!cluster && own.has(b.name)) - (!cluster && own.has(a.name)) || a.name.localeCompare(b.name));
  document.getElementById("nodes").replaceChildren(make("div", { class: "cards" },
    ...order.map((node) => nodeCard(node, views, own.get(node.name), found.problems[short(node.name)])),
    ...without.map(([name, problem]) => make("article", { class: "card bad" }, make("h2", null, name), make("p", null, problem)))));
  const bad = document.querySelectorAll("#nodes .card.bad").length;
  document.getElementById("summary").textContent = `${counted(order.length + without.length, "node")}${bad ? ` · ${bad} with errors` : ""}`;
}

function nodeCard(node, views, own, problem) {
  const primary = node["primary-address"] || {};
  const families = [primary.ipv4, primary.ipv6].filter(Boolean);
  const addresses = [...families, ...(node["secondary-addresses"] || [])].map((one) => one.ip).filter(Boolean);
  const probes = views.map(([name, view]) => [name, view.health, (view.health?.nodes || []).find((one) => one.name === node.name)]);
  const peers = views.flatMap(([name, view]) => (view.wireguard || []).filter((one) => isAt(one.endpoint, addresses)).map((one) => [name, one]));
  const sessions = own?.bgp || [];
  const status = own?.status;
  const paths = probes.flatMap(([, , one]) => [one?.host?.["primary-address"], one?.["health-endpoint"]?.["primary-address"]]);
  const well = !problem && !paths.some(badPath) && (!status || status.cilium.state === "Ok") && sessions.every((one) => one["session-state"] === "established");
  return make("article", { class: `card${well ? "" : " bad"}`, "data-node": node.name },
    make("h2", null, node.name, own && !cluster ? " (this one)" : ""),
    problem ? make("p", { class: "denied-text" }, problem) : null,
    facts([
      ["agent", status ? `${status.cilium.state} ${status.cilium.msg || ""}` : ""],
      ["addresses", families.map((one) => one.ip).filter(Boolean).join(", ")],
      ["pods", families.map((one) => one["alloc-range"]).filter(Boolean).join(", ")],
      ["node reached", probeText(probes, "host", node.name)],
      ["pods reached", probeText(probes, "health-endpoint", node.name)],
      ["routing", [status?.routing?.["inter-host-routing-mode"], status?.routing?.["tunnel-protocol"]].filter(Boolean).join(", ")],
      ["encryption", own ? encryptionText(status, own.wireguard) : ""],
      ["Hubble", status?.hubble ? `${status.hubble.state} ${status.hubble.msg || ""}` : ""],
    ]),
    peers.length ? peerTable("WireGuard", ["seen from", "handshake", "received", "sent"], peers.map(([name, one]) =>
      [cluster ? name : "this node", ago(one["last-handshake-time"]), bytes(one["transfer-rx"]), bytes(one["transfer-tx"])])) : null,
    sessions.length ? peerTable("BGP", ["peer", "AS", "session", "sent, received"], sessions.map((one) =>
      [one["peer-address"], one["peer-asn"], one["session-state"], one["session-error"] || (one.families || []).map((family) =>
        `${family.afi} ${family.advertised || 0}, ${family.received || 0}`).join("; ")]), (row) => row[2] !== "established") : null,
    cluster && own ? make("button", { class: "link", onclick: () => showInsideOf(node.name.slice(node.name.indexOf("/") + 1)) }, "inside its agent") : null);
}

function peerTable(title, heads, rows, isBad = () => false) {
  return make("table", { class: "peers" }, make("caption", null, title),
    make("thead", null, make("tr", null, ...heads.map((one) => make("th", { scope: "col" }, one)))),
    make("tbody", null, ...rows.map((row) => make("tr", { class: isBad(row) ? "denied-text" : "" }, ...row.map((one) => make("td", null, String(one)))))));
}

function isAt(endpoint, addresses) {
  const at = (endpoint || "").replace(/:\d+$/, "").replace(/^\[|\]$/g, "");
  return addresses.includes(at);
}

function encryptionText(status, peers) {
  const one = status.encryption;
  if (!one?.mode || one.mode === "Disabled") return one?.mode || "";
  const missing = (peers || []).filter((peer) => !Date.parse(peer["last-handshake-time"] || "")).length;
  return `${one.mode}${peers ? `, ${counted(peers.length, "peer")}${missing ? `, ${missing} without a handshake` : ""}` : ""}`;
}

function probeText(probes, what, name) {
  const asked = probes.filter(([, health]) => health);
  if (!asked.length) return what === "host" ? "not probed (enable-health-checking)" : "";
  const seen = asked.map(([from, , one]) => [from, one?.[what]?.["primary-address"]]).filter(([, path]) => path);
  if (!seen.length) return what === "host" ? "not probed yet" : "";
  if (!cluster) return pathText(seen[0][1]);
  const bad = seen.filter(([, path]) => badPath(path));
  if (bad.length) return `by ${seen.length - bad.length} of ${seen.length}; not from ${bad.map(([from, path]) => `${from} (${pathText(path)})`).join(", ")}`;
  const slowest = Math.max(...seen.map(([, path]) => path.icmp?.latency || path.http?.latency || 0));
  return `by all ${seen.length}, in at most ${milliseconds(slowest / 1e9)}`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (count = count || 0; count >= 1000 && at < units.length - 1; at++) count /= 1000;
  return `${at && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

function ago(text) {
  const at = Date.parse(text || "");
  if (!(at > 0)) return "never";
  const seconds = Math.max(0, Math.round((Date.now() - at) / 1000));
  return seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
}
