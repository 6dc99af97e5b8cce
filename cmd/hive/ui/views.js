// Who may talk to whom as a matrix, the rules that decide, and how nodes are.

const SIGNS = { allowed: "✓", denied: "✕", mixed: "◐", elsewhere: "→" };
const LABELS = ["app.kubernetes.io/name", "app", "k8s-app", "name"];
let matrixShown = "";
let explained = 0;

function endName(end) {
  if (!end.labels.some((label) => label.startsWith("k8s:"))) return end.ask;
  const found = LABELS.map((key) => end.labels.find((label) => label.startsWith(`k8s:${key}=`))).find(Boolean);
  const name = found ? found.slice(found.indexOf("=") + 1) : end.pods[0]?.split("/")[1] || `identity ${end.identity}`;
  return `${end.namespace}/${name}`;
}

async function showPolicy() {
  const [from, to] = ["from", "to"].map((id) => document.getElementById(id));
  const found = await get(`policy?from=${encodeURIComponent(from.value)}&to=${encodeURIComponent(to.value)}`);
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

async function showNodes() {
  const found = await get("nodes");
  const health = new Map((found.health?.nodes || []).map((node) => [node.name, node]));
  const nodes = [...(found.nodes["nodes-added"] || [])].sort((a, b) =>
    (b.name === found.nodes.self) - (a.name === found.nodes.self) || a.name.localeCompare(b.name));
  document.getElementById("nodes").replaceChildren(
    make("div", { class: "cards" }, agentCard(found.status), ...nodes.map((node) => nodeCard(node, found, health.get(node.name))),
      ...(found.bgp || []).map(sessionCard)));
}

function agentCard(status) {
  const wireguard = (status.encryption?.wireguard?.interfaces || []).map((one) => `${one.name}, ${counted(one["peer-count"] || 0, "peer")}`);
  return make("article", { class: `card${status.cilium.state === "Ok" ? "" : " bad"}` }, make("h2", null, "This agent"), facts([
    ["state", `${status.cilium.state} ${status.cilium.msg || ""}`],
    ["routing", [status.routing?.["inter-host-routing-mode"], status.routing?.["tunnel-protocol"]].filter(Boolean).join(", ")],
    ["encryption", [status.encryption?.mode, ...wireguard].filter(Boolean).join(": ")],
    ["Hubble", status.hubble ? `${status.hubble.state} ${status.hubble.msg || ""}` : ""],
  ]));
}

function nodeCard(node, found, health) {
  const primary = node["primary-address"] || {};
  const paths = [health?.host?.["primary-address"], health?.["health-endpoint"]?.["primary-address"]];
  const families = [primary.ipv4, primary.ipv6].filter(Boolean);
  return make("article", { class: `card${paths.some(badPath) ? " bad" : ""}` },
    make("h2", null, node.name, node.name === found.nodes.self ? " (this one)" : ""), facts([
      ["addresses", families.map((one) => one.ip).filter(Boolean).join(", ")],
      ["pods", families.map((one) => one["alloc-range"]).filter(Boolean).join(", ")],
      ["node", health ? pathText(paths[0]) || "not probed yet" : found.health ? "not probed yet" : "not probed (enable-health-checking)"],
      ["pods' way", pathText(paths[1])],
    ]));
}

function sessionCard(peer) {
  return make("article", { class: `card${peer["session-state"] === "established" ? "" : " bad"}` },
    make("h2", null, `BGP ${peer["peer-address"]}`), facts([
      ["session", peer["session-state"]],
      ["AS", `${peer["local-asn"]} to ${peer["peer-asn"]}`],
      ["routes", (peer.families || []).map((one) => `${one.afi}/${one.safi}: ${one.advertised || 0} sent, ${one.received || 0} received`).join(", ")],
    ]));
}
