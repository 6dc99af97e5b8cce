// The graph as the page sees it: one cell per module that holds something, with its neighbours.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GRAPH = DATA.graph;

function tail(id) {
  return id.slice(id.lastIndexOf(".") + 1);
}

function grouped(things, keyOf) {
  const groups = new Map();
  for (const thing of things) {
    const key = keyOf(thing);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(thing);
  }
  return groups;
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
      name: tail(module.id),
      title: module.title === module.id ? "" : module.title,
      parent: module.parent,
      hue: hues.get(module.parent),
      constructors: parts[0],
      invokes: parts[1],
      settings: parts[2],
      hooks: parts[3],
      needs: new Map(),
      users: new Map(),
      x: 0,
      y: 0,
    });
  }
  return cells;
}

const CELLS = makeCells(GRAPH);
const NODES = new Map([...GRAPH.constructors, ...GRAPH.invokes].map((node) => [node.id, node]));
const HOOKS = new Map(GRAPH.hooks.map((hook) => [hook.id, hook]));
const NEEDS = grouped(GRAPH.edges, (edge) => edge.from);
const USERS = grouped(GRAPH.edges, (edge) => edge.to);

for (const edge of GRAPH.edges) {
  const from = CELLS.get(NODES.get(edge.from).module);
  const to = CELLS.get(NODES.get(edge.to).module);
  if (from === to) continue;
  if (!from.needs.has(to.id)) from.needs.set(to.id, []);
  if (!to.users.has(from.id)) to.users.set(from.id, []);
  from.needs.get(to.id).push(edge);
  to.users.get(from.id).push(edge);
}

function labelOf(node) {
  return node.provides || node.name;
}

function counted(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function milliseconds(seconds) {
  const value = seconds * 1000;
  return `${value.toFixed(value >= 10 ? 0 : value >= 1 ? 1 : 2)} ms`;
}

// An element with its attributes and children; text is never read as HTML.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  if (tag === "button") element.type = "button";
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
