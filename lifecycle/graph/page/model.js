// The graph as the page sees it: one cell per module that holds something, with its neighbours.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GRAPH = DATA.graph;
const FAULTS = GRAPH.faults || [];
const WHY = { missing: "nothing provides it", private: "it is private elsewhere" };
const WORDS = { cycle: "in a cycle", constructor: "cannot be used", invoke: "cannot be used" };

// What is needed and not there stands in the drawing as a module of its own, with one constructor.
function addMissing() {
  for (const fault of FAULTS) {
    if (!fault.lacks) continue;
    const id = `${fault.kind} ${fault.lacks}`;
    if (!GRAPH.modules.some((module) => module.id === id)) {
      GRAPH.modules.push({ id, title: WHY[fault.kind], parent: null, missing: fault.lacks });
      GRAPH.constructors.push({
        id, name: fault.lacks, provides: fault.lacks, kind: fault.kind, module: id, file: "", line: 0, injected: [],
        private: false, built: true, replaced: false,
      });
    }
    for (const node of fault.nodes) GRAPH.edges.push({ from: node, to: id, parameter: "", fault: true });
  }
}

// Cells by id. `needs` and `users` map the id of another cell to the arrows between the two.
function makeCells(graph) {
  const of = (things) => grouped(things, (thing) => thing.module);
  const constructors = of(graph.constructors);
  const invokes = of(graph.invokes);
  const settings = of(graph.settings);
  const hooks = of(graph.hooks);
  const hues = new Map();
  const cells = new Map();
  for (const module of graph.modules) {
    const parts = [constructors, invokes, settings, hooks].map((kind) => kind.get(module.id) || []);
    if (!parts.some((part) => part.length)) continue;
    if (!hues.has(module.parent)) hues.set(module.parent, (210 + hues.size * 137) % 360);
    cells.set(module.id, {
      id: module.id,
      name: module.missing || tail(module.id),
      title: module.title === module.id ? "" : module.title,
      missing: Boolean(module.missing),
      hue: hues.get(module.parent),
      constructors: parts[0],
      invokes: parts[1],
      settings: parts[2],
      hooks: parts[3],
      needs: new Map(),
      users: new Map(),
      health: "", // the worst that it reports, of a running hive: ok or degraded
      reports: [], // why it is degraded
      circle: 0, // the same number for modules that all need each other
      height: 0,
      x: 0,
      y: 0,
    });
  }
  return cells;
}

// Level and message by place: of each cell the worst.
function takeHealth(health) {
  for (const cell of CELLS.values()) [cell.health, cell.reports] = ["", []];
  for (const [place, [level, message]] of Object.entries(health)) {
    let id = place; // of a job, for one: its module is around it
    while (id && !CELLS.has(id)) id = id.slice(0, Math.max(0, id.lastIndexOf(".")));
    const cell = CELLS.get(id);
    if (!cell || (level !== "ok" && level !== "degraded")) continue;
    if (cell.health !== "degraded") cell.health = level;
    if (level === "degraded") cell.reports.push(message);
  }
}

addMissing();
const CELLS = makeCells(GRAPH);
takeHealth(DATA.health);
const NODES = new Map([...GRAPH.constructors, ...GRAPH.invokes].map((node) => [node.id, node]));
const HOOKS = new Map(GRAPH.hooks.map((hook) => [hook.id, hook]));
const HOOKS_OF = grouped(GRAPH.hooks, (hook) => hook.constructor);
const NEEDS = grouped(GRAPH.edges, (edge) => edge.from);
const USERS = grouped(GRAPH.edges, (edge) => edge.to);
const PARENTS = new Map(GRAPH.modules.map((module) => [module.id, module.parent]));

// What is wrong with a constructor itself, in words; and the arrows that are a fault.
const FAULTY = new Map();
const FAULTY_EDGES = new Set();
for (const fault of FAULTS) {
  fault.nodes.forEach((node, at) => {
    if (fault.kind === "cycle") FAULTY_EDGES.add(`${node} ${fault.nodes[(at + 1) % fault.nodes.length]}`);
    if (!fault.lacks) FAULTY.set(node, (FAULTY.get(node) || new Set()).add(WORDS[fault.kind] || fault.kind));
  });
}
for (const edge of GRAPH.edges) if (edge.fault) FAULTY_EDGES.add(`${edge.from} ${edge.to}`);

for (const edge of GRAPH.edges) {
  const from = CELLS.get(NODES.get(edge.from).module);
  const to = CELLS.get(NODES.get(edge.to).module);
  if (from === to) continue;
  if (!from.needs.has(to.id)) from.needs.set(to.id, []);
  if (!to.users.has(from.id)) to.users.set(from.id, []);
  from.needs.get(to.id).push(edge);
  to.users.get(from.id).push(edge);
}

// What the hive itself gives (Health, Jobs, ...) and every table, each with who uses it.
const TABLE = /^(Table|ReadTable|Derived)\[/;
const USES = new Map();
for (const node of [...GRAPH.constructors, ...GRAPH.invokes]) {
  for (const type of node.injected) {
    if (!USES.has(type)) USES.set(type, { type, kind: "hive", provider: null, users: [] });
    USES.get(type).users.push(node);
  }
  if (node.provides && TABLE.test(node.provides) && !node.replaced) {
    const users = (USERS.get(node.id) || []).map((edge) => NODES.get(edge.from));
    USES.set(node.provides, { type: node.provides, kind: "table", provider: node, users: [...new Set(users)] });
  }
}

function labelOf(node) {
  return node.provides || node.name;
}
