// How the start went, when the page was made from a running agent.

const SPANS = { construct: new Map(), invoke: new Map(), start: new Map(), stop: new Map() };
for (const span of DATA.timeline ? DATA.timeline.spans : []) SPANS[span.kind].set(span.id, span);

const CRITICAL = new Set(DATA.critical);

function ticks(length) {
  const rough = length / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let at = 0; at <= length; at += step) found.push(at);
  return found;
}

function axis(length) {
  return make("div", { class: "axis" }, ...ticks(length).map((at) => make("span", {
    style: `left:${(100 * at) / length}%`,
  }, `${+(at * 1000).toPrecision(3)}`)));
}

function bar(kind, from, to, origin, length) {
  const percent = (time) => (100 * Math.max(0, time)) / length;
  return make("i", { class: kind, style: `left:${percent(from - origin)}%;width:${percent(to - from)}%` });
}

function hookRow(hook, origin, length) {
  const span = SPANS.start.get(hook.id);
  const held = HOOKS.get(DATA.held[hook.id]);
  const lane = make("div", { class: "lane" });
  const why = held ? `held by ${held.name} (${held.module})` : "waited for nothing";
  if (span) {
    if (held) lane.append(bar("wait", origin, span.began, origin, length));
    lane.append(bar("run", span.began, span.began + span.took, origin, length));
  }
  return make("button", {
    class: `row${CRITICAL.has(hook.id) ? " critical" : ""}`,
    "data-hook": hook.id,
    title: `${hook.module}: ${hook.name}, ${why}`,
    onclick: () => choose(hook.module, hook.id),
  }, make("span", { class: "who" }, hook.name, " ", make("small", null, tail(hook.module))),
  lane, make("span", { class: "took" }, span ? milliseconds(span.took) : "not yet"));
}

function constructorRow(node, span, origin, length) {
  return make("button", {
    class: "row", title: node.id, onclick: () => choose(node.module, node.id),
  }, make("span", { class: "who" }, labelOf(node), " ", make("small", null, tail(node.module))),
  make("div", { class: "lane" }, bar("run", span.began, span.began + span.took, origin, length)),
  make("span", { class: "took" }, milliseconds(span.took)));
}

function extent(spans) {
  const began = Math.min(...spans.map((span) => span.began));
  return [began, Math.max(...spans.map((span) => span.began + span.took), began + 1e-6) - began];
}

function drawStart() {
  const start = document.getElementById("start");
  const started = [...SPANS.start.values()];
  const built = [...SPANS.construct.values(), ...SPANS.invoke.values()].sort((a, b) => a.began - b.began);
  if (started.length) {
    const [origin, length] = extent(started);
    const rank = (hook) => (SPANS.start.has(hook.id) ? SPANS.start.get(hook.id).began : Infinity);
    const hooks = [...GRAPH.hooks].sort((a, b) => rank(a) - rank(b));
    const way = DATA.critical.map((id) => HOOKS.get(id)).filter(Boolean).map((hook) => hook.name).join(" → ");
    start.append(make("div", { class: "chart" },
      make("h2", null, `${counted(started.length, "hook")} started in ${milliseconds(length)}`),
      make("p", null, `The thin line is waiting. In the second colour, what the start had to wait for: ${way}.`),
      axis(length), ...hooks.map((hook) => hookRow(hook, origin, length))));
  }
  if (built.length) {
    const [origin, length] = extent(built);
    start.append(make("details", null,
      make("summary", null, `${built.length} constructed and invoked in ${milliseconds(length)}`),
      make("div", { class: "chart" }, axis(length),
        ...built.map((span) => constructorRow(NODES.get(span.id), span, origin, length)))));
  }
}
