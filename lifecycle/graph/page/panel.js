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

// How an editor is told to open a file at a line. `file` has no line, but needs no editor.
const EDITORS = {
  "VS Code": (file, line) => `vscode://file${file}:${line}`,
  VSCodium: (file, line) => `vscodium://file${file}:${line}`,
  Cursor: (file, line) => `cursor://file${file}:${line}`,
  PyCharm: (file, line) => `pycharm://open?file=${file}&line=${line}`,
  "this browser": (file) => `file://${file}`,
};

function editor() {
  try {
    return localStorage.getItem("hive-editor") in EDITORS ? localStorage.getItem("hive-editor") : "VS Code";
  } catch { // a browser may keep nothing for pages that are files
    return "VS Code";
  }
}

function placeLink(node) {
  if (!node.line) return null;
  const href = EDITORS[editor()](node.file.split("/").map(encodeURIComponent).join("/"), node.line);
  return make("a", { class: "place", href, title: `${node.file}:${node.line}, in ${editor()}` }, placeOf(node));
}

function editorChoice() {
  const names = Object.keys(EDITORS).map((name) => make("option", { selected: name === editor() }, name));
  return make("label", { class: "editor" }, "Places open in ", make("select", {
    onchange: (event) => {
      try {
        localStorage.setItem("hive-editor", event.target.value);
      } catch { return; }
      showAgain();
    },
  }, ...names));
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

// What the hive itself gives a constructor; each leads to all who use it.
function givenLine(node) {
  if (!node.injected.length) return null;
  return make("div", { class: "more" }, "given by the hive: ", ...listed(node.injected.map((type) => typeLink(type))));
}

function typeLink(type) {
  return make("button", { class: "link", title: `who uses ${type}`, onclick: () => chooseType(type) }, type);
}

function wrongLine(node) {
  const words = [...(FAULTY.get(node.id) || [])];
  for (const edge of NEEDS.get(node.id) || []) {
    if (edge.fault) words.push(`needs ${NODES.get(edge.to).name}: ${CELLS.get(edge.to).title}`);
  }
  return words.length ? make("div", { class: "wrong" }, words.join("; ")) : null;
}

function nodeItem(node) {
  const label = labelOf(node);
  return make("li", { "data-item": node.id },
    make("code", null, label), label === node.name ? null : ` from ${node.name}`, ...marks(node),
    wrongLine(node),
    arrowsLine("needs", (NEEDS.get(node.id) || []).filter((edge) => !edge.fault && !edge.order), "to"),
    arrowsLine("comes after", (NEEDS.get(node.id) || []).filter((edge) => edge.order), "to"),
    arrowsLine("needed by", (USERS.get(node.id) || []).filter((edge) => !edge.order), "from"),
    arrowsLine("comes before", (USERS.get(node.id) || []).filter((edge) => edge.order), "from"),
    givenLine(node),
    make("div", { class: "where" }, placeLink(node), tookLine(node.provides ? "construct" : "invoke", node.id)));
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
  const owner = NODES.get(hook.constructor);
  return make("li", { "data-item": hook.id },
    make("code", null, hook.name), tookLine("start", hook.id),
    owner ? make("div", { class: "more" }, "of ", nodeLink(owner.id, "needs")) : null,
    make("div", { class: "more" }, ...(links.length ? ["waits for ", ...listed(links)] : ["waits for nothing"])));
}

function section(title, items) {
  return items.length ? [make("h3", null, title), make("ul", null, ...items)] : [];
}

function showPanel(cell, item) {
  const inside = GRAPH.modules.filter((module) => module.parent === cell.id && CELLS.has(module.id));
  const provided = cell.constructors.filter((node) => node.kind !== "config" && !cell.missing);
  fill(
    make("div", { class: "path" }, cell.missing ? "" : cell.id),
    make("h2", null, cell.name),
    cell.title ? make("p", { class: cell.missing ? "wrong" : "title" }, cell.title) : "",
    ...cell.reports.map((message) => make("p", { class: "wrong" }, `degraded: ${message}`)),
    cell.circle ? make("p", { class: "in-circle" }, "↻ ", ...circleOf(cell)) : "",
    ...section("Provides", provided.map(nodeItem)),
    ...section("Invokes", cell.invokes.map(nodeItem)),
    ...section("Needs", [...cell.needs].map(([id, edges]) => neighbourItem(id, edges, "needs"))),
    ...section("Is needed by", [...cell.users].map(([id, edges]) => neighbourItem(id, edges, "users"))),
    ...section("Sets", cell.settings.map(settingItem)),
    ...section("Hooks", cell.hooks.map(hookItem)),
    ...section("Modules inside", inside.map((module) => make("li", null, cellLink(module.id)))),
    editorChoice(),
  );
  const found = item && panel.querySelector(`[data-item="${CSS.escape(item)}"]`);
  if (found) {
    found.classList.add("flash");
    found.scrollIntoView({ block: "center" });
  }
}

function circleOf(cell) {
  const others = [...CELLS.values()].filter((one) => one.circle === cell.circle && one !== cell);
  return ["needs and is needed by ", ...listed(others.map((one) => cellLink(one.id))),
    ". Modules may need each other; constructors may not."];
}

// Who uses what the hive gives, or a table.
function showType(use) {
  const byCell = grouped(use.users, (node) => node.module);
  const items = [...byCell].map(([id, nodes]) => make("li", null, cellLink(id, "users"), make("span", { class: "more" },
    "  ", ...listed(nodes.map((node) => nodeLink(node.id, "users"))))));
  fill(
    make("div", { class: "path" }, use.kind === "hive" ? "given by the hive to whoever asks for it" : "a table"),
    make("h2", null, use.type),
    ...(use.provider ? section("Is made by", [nodeItem(use.provider)]) : []),
    ...section(`Is used by ${counted(use.users.length, "constructor")} in ${counted(byCell.size, "module")}`, items),
    editorChoice(),
  );
}

function showFaults() {
  fill(
    make("h2", null, `${GRAPH.name} cannot be built`),
    ...FAULTS.flatMap((fault) => section(fault.kind, [make("li", null,
      make("div", { class: "wrong" }, fault.text),
      ...fault.details.map((line) => make("div", { class: "detail" }, line)),
      fault.nodes.length ? make("div", { class: "more" }, "see ",
        ...listed(fault.nodes.map((id) => nodeLink(id, "needs")))) : null)])),
  );
}

function fill(...contents) {
  panel.replaceChildren(
    make("button", { class: "close", "aria-label": "Close", onclick: () => choose(null) }, "×"), ...contents);
  panel.hidden = false;
  panel.scrollTop = 0;
}
