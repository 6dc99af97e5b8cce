// Where cards of namespaces stand: in columns from who asks to who is asked, as many as there is room for.

// What each pair of groups sends in its larger direction, as [{ from, to, weight }].
function netFlows(edges, groupAt) {
  const net = new Map();
  for (const edge of edges) {
    const [from, to] = [groupAt(edge.from), groupAt(edge.to)];
    if (from === to) continue;
    const [pair, sign] = from < to ? [`${from}\n${to}`, 1] : [`${to}\n${from}`, -1];
    net.set(pair, (net.get(pair) || 0) + sign * flowsOf(edge));
  }
  return [...net].filter(([, weight]) => weight).map(([pair, weight]) => {
    const [from, to] = weight > 0 ? pair.split("\n") : pair.split("\n").reverse();
    return { from, to, weight: Math.abs(weight) };
  });
}

// An order in which little flows backwards (Eades, Lin, Smyth 1993): who is only asked last, who asks most first.
function inOrder(names, arcs) {
  const rest = new Set(names);
  const [first, last] = [[], []];
  while (rest.size) {
    const flow = new Map([...rest].map((name) => [name, { sent: 0, received: 0 }]));
    for (const { from, to, weight } of arcs) {
      if (!rest.has(from) || !rest.has(to)) continue;
      flow.get(from).sent += weight;
      flow.get(to).received += weight;
    }
    const asked = [...rest].find((name) => !flow.get(name).sent);
    const surplus = (name) => flow.get(name).sent - flow.get(name).received;
    const next = asked ?? [...rest].reduce((best, name) => (surplus(name) > surplus(best) ? name : best));
    rest.delete(next);
    if (asked === undefined) first.push(next);
    else last.unshift(next);
  }
  return [...first, ...last];
}

// Columns by how far each is from those that only ask; filled one after the other where that would be too high.
function columnsOf(names, arcs, heightOf, room) {
  const order = inOrder([...names].sort(), arcs);
  const at = new Map(order.map((name, place) => [name, place]));
  const rank = new Map(order.map((name) => [name, 0]));
  for (const name of order) {
    for (const arc of arcs) {
      if (arc.from !== name || !(at.get(arc.to) > at.get(name))) continue;
      rank.set(arc.to, Math.max(rank.get(arc.to), Math.min(room.columns - 1, rank.get(name) + 1)));
    }
  }
  const height = (column) => sum(column.map(heightOf));
  let columns = [...grouped([...order].sort((a, b) => rank.get(a) - rank.get(b)), (name) => rank.get(name)).values()];
  if (Math.max(0, ...columns.map(height)) > room.height) {
    const all = columns.flat();
    const share = height(all) / room.columns;
    columns = Array.from({ length: room.columns }, () => []);
    let filled = 0;
    for (const name of all) {
      columns[Math.min(room.columns - 1, Math.floor((filled + heightOf(name) / 2) / share))].push(name);
      filled += heightOf(name);
    }
    columns = columns.filter((column) => column.length);
  }
  untangle(columns, arcs);
  return columns;
}

// Within columns, each as high as what it talks to in others.
function untangle(columns, arcs) {
  const place = new Map();
  const note = (column) => column.forEach((name, at) => place.set(name, (at + 0.5) / column.length));
  columns.forEach(note);
  for (let round = 0; round < 4; round++) {
    for (const column of columns) {
      const here = new Set(column);
      const wanted = new Map(column.map((name) => {
        let [all, total] = [0, 0];
        for (const { from, to, weight } of arcs) {
          const other = from === name ? to : to === name ? from : null;
          if (other === null || here.has(other) || !place.has(other)) continue;
          const pull = Math.log2(1 + weight);
          all += pull * place.get(other);
          total += pull;
        }
        return [name, total ? all / total : place.get(name)];
      }));
      column.sort((a, b) => wanted.get(a) - wanted.get(b));
      note(column);
    }
  }
}
