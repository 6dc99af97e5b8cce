// The panel beside the drawing: what the chosen cell provides, needs, sets and runs.

const panel = document.getElementById("panel");

// Where all the sources are: the folder that every path begins with.
const SOURCES = [...NODES.values()].map((node) => node.file).reduce((common, file) => {
  let same = 0;
  while (same < common.length && common[same] === file[same]) same++;
  return common.slice(0, common.lastIndexOf("/", same - 1) + 1);
}, GRAPH.constructors.length ? GRAPH.constructors[0].file : "");

function placeOf(node) {
  return node.line ? `${node.file.slice(SOURCES.length)}:${node.line}` : "";
}

function cellLink(id, kind = "needs") {
  const cell = CELLS.get(id);
  return make("button", { class: `link ${kind}`, title: id, onclick: () => choose(id) }, cell ? cell.name : id);
}

function nodeLink(id, kind) {
  const node = NODES.get(id);
  return make("button", { class: `link ${kind}`, title: id, onclick: () => choose(node.module, id) }, labelOf(node));
}

function listed(links) {
  return links.flatMap((link, index) => (index ? [", ", link] : [link]));
}

function arrowsLine(word, edges, end) {
  if (!edges || !edges.length) return null;
  const ids = [...new Set(edges.map((edge) => edge[end]))];
  const kind = end === "to" ? "needs" : "users";
  return make("div", { class: "more" }, `${word} `, ...listed(ids.map((id) => nodeLink(id, kind))));
}

function marks(node) {
  const held = {
    private: node.private,
    [node.kind]: node.kind && node.kind !== "provide",
    replaced: node.replaced,
    "not needed": node.built === false && !node.replaced,
  };
  return Object.keys(held).filter((name) => held[name]).map((name) => make("span", { class: "mark" }, name));
}

function tookLine(kind, id) {
  const span = SPANS[kind].get(id);
  return span ? ` ${milliseconds(span.took)}` : "";
}

function nodeItem(node) {
  const label = labelOf(node);
  return make("li", { "data-item": node.id },
    make("code", null, label), label === node.name ? null : ` from ${node.name}`, ...marks(node),
    arrowsLine("needs", NEEDS.get(node.id), "to"),
    arrowsLine("needed by", USERS.get(node.id), "from"),
    node.injected.length ? make("div", { class: "more" }, `given by the hive: ${node.injected.join(", ")}`) : null,
    make("span", { class: "place" }, placeOf(node) + tookLine(node.provides ? "construct" : "invoke", node.id)));
}

function neighbourItem(id, edges, kind) {
  const end = kind === "needs" ? "to" : "from";
  const types = [...new Set(edges.map((edge) => labelOf(NODES.get(edge[end]))))];
  return make("li", null, cellLink(id, kind), make("span", { class: "more" }, `  ${types.join(", ")}`));
}

function settingItem(setting) {
  const origin = setting.origin === "default" ? "" : setting.origin;
  return make("li", { "data-item": `setting ${setting.name}` },
    make("code", null, setting.name), " = ", make("span", { class: "value" }, setting.value || "(nothing)"),
    origin ? make("span", { class: "mark" }, origin) : null,
    make("div", { class: "more" }, [setting.help, `(${setting.type})`].filter(Boolean).join(" ")));
}

function hookItem(hook) {
  const waits = hook.after.map((id) => HOOKS.get(id)).filter(Boolean);
  const links = waits.map((need) => make("button", {
    class: "link", title: need.id, onclick: () => choose(need.module, need.id),
  }, need.name));
  return make("li", { "data-item": hook.id },
    make("code", null, hook.name), tookLine("start", hook.id),
    make("div", { class: "more" }, ...(links.length ? ["waits for ", ...listed(links)] : ["waits for nothing"])));
}

function section(title, items) {
  return items.length ? [make("h3", null, title), make("ul", null, ...items)] : [];
}

function showPanel(cell, item) {
  const inside = GRAPH.modules.filter((module) => module.parent === cell.id && CELLS.has(module.id));
  const provided = cell.constructors.filter((node) => node.kind !== "config");
  panel.replaceChildren(
    make("button", { class: "close", "aria-label": "Close", onclick: () => choose(null) }, "×"),
    make("div", { class: "path" }, cell.id),
    make("h2", null, cell.name),
    cell.title ? make("p", { class: "title" }, cell.title) : "",
    ...section("Provides", provided.map(nodeItem)),
    ...section("Invokes", cell.invokes.map(nodeItem)),
    ...section("Needs", [...cell.needs].map(([id, edges]) => neighbourItem(id, edges, "needs"))),
    ...section("Is needed by", [...cell.users].map(([id, edges]) => neighbourItem(id, edges, "users"))),
    ...section("Sets", cell.settings.map(settingItem)),
    ...section("Hooks", cell.hooks.map(hookItem)),
    ...section("Modules inside", inside.map((module) => make("li", null, cellLink(module.id)))),
  );
  panel.hidden = false;
  panel.scrollTop = 0;
  const found = item && panel.querySelector(`[data-item="${CSS.escape(item)}"]`);
  if (found) {
    found.classList.add("flash");
    found.scrollIntoView({ block: "center" });
  }
}
