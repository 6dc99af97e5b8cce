// A layered drawing: rows from what needs nothing to what needs most, few crossings, straight long arrows.
// After Sugiyama: rows of bounded length, barycentres against crossings, least squares for the places.

const CELL = { width: 300, gap: 8 };
const BEND = { width: 4, gap: 4 }; // the room a passing arrow takes in a row
const ROW = { near: 26, far: 80 }; // between rows; more where many arrows pass
const MANY = 200; // cells that no window shows with legible names

// Needs of each cell with the cycles between modules cut (constructors have none, modules may).
function acyclicNeeds(cells) {
  const state = new Map();
  const needs = new Map([...cells.keys()].map((id) => [id, []]));
  for (const root of cells.keys()) {
    if (state.has(root)) continue;
    const path = [[root, cells.get(root).needs.keys()]];
    state.set(root, "open");
    while (path.length) {
      const [id, left] = path[path.length - 1];
      const next = left.next();
      if (next.done) {
        state.set(id, "done");
        path.pop();
      } else if (state.get(next.value) !== "open") {
        needs.get(id).push(next.value);
        if (!state.has(next.value)) {
          state.set(next.value, "open");
          path.push([next.value, cells.get(next.value).needs.keys()]);
        }
      }
    }
  }
  return needs;
}

// Every cell after all it needs.
function topological(needs) {
  const order = [];
  const waits = new Map([...needs].map(([id, list]) => [id, list.length]));
  const users = new Map([...needs.keys()].map((id) => [id, []]));
  for (const [id, list] of needs) for (const need of list) users.get(need).push(id);
  const ready = [...needs.keys()].filter((id) => !waits.get(id));
  for (let at = 0; at < ready.length; at++) {
    order.push(ready[at]);
    for (const user of users.get(ready[at])) {
      waits.set(user, waits.get(user) - 1);
      if (!waits.get(user)) ready.push(user);
    }
  }
  return { order, users };
}

// The needs that no longer way replaces: what is left shows the same order with far fewer arrows.
function withoutShortcuts(needs, order) {
  const number = new Map(order.map((id, index) => [id, index]));
  const words = Math.ceil(order.length / 32);
  const reach = new Map();
  const kept = new Map();
  for (const id of order) {
    const seen = new Uint32Array(words);
    const direct = [...needs.get(id)].sort((a, b) => number.get(b) - number.get(a));
    const left = [];
    for (const need of direct) {
      const at = number.get(need);
      if (seen[at >> 5] & (1 << (at & 31))) continue;
      left.push(need);
      const below = reach.get(need);
      for (let word = 0; word < words; word++) seen[word] |= below[word];
      seen[at >> 5] |= 1 << (at & 31);
    }
    reach.set(id, seen);
    kept.set(id, left);
  }
  return kept;
}

// Row of each cell: after its needs, no row longer than fits the shape of a screen.
function rowsOf(needs, users, order) {
  const longest = Math.max(4, Math.ceil(Math.sqrt(order.length * 1.1)));
  const rest = new Map(); // how long the chain above a cell is: the longest goes first
  for (const id of [...order].reverse()) {
    rest.set(id, 1 + Math.max(0, ...users.get(id).map((user) => rest.get(user))));
  }
  const layer = new Map();
  const counts = [];
  const urgent = [...order].sort((a, b) => rest.get(b) - rest.get(a));
  for (const id of urgent) {
    let at = Math.max(0, ...needs.get(id).map((need) => layer.get(need) + 1));
    while ((counts[at] || 0) >= longest) at++;
    layer.set(id, at);
    counts[at] = (counts[at] || 0) + 1;
  }
  for (const id of [...order].reverse()) { // towards its users, where there is room: shorter arrows
    const last = Math.min(...users.get(id).map((user) => layer.get(user) - 1));
    for (let at = last; Number.isFinite(last) && at > layer.get(id); at--) {
      if ((counts[at] || 0) >= longest) continue;
      counts[layer.get(id)]--;
      counts[at] = (counts[at] || 0) + 1;
      layer.set(id, at);
      break;
    }
  }
  return layer;
}

// Rows of points, cells and bends, each with its neighbours above and below.
function pointsOf(kept, row) {
  const rows = [];
  const points = new Map();
  const routes = [];
  const add = (at, id) => {
    const point = { id, at, above: [], below: [], x: 0, place: 0, width: id ? CELL.width : BEND.width };
    (rows[at] = rows[at] || []).push(point);
    return point;
  };
  for (const [id, at] of row) points.set(id, add(at, id));
  for (const [id, list] of kept) {
    for (const need of list) {
      const way = [points.get(need)];
      for (let at = row.get(need) + 1; at < row.get(id); at++) way.push(add(at, null));
      way.push(points.get(id));
      for (let step = 1; step < way.length; step++) {
        way[step - 1].below.push(way[step]);
        way[step].above.push(way[step - 1]);
      }
      routes.push({ from: id, to: need, way });
    }
  }
  for (let at = 0; at < rows.length; at++) rows[at] = rows[at] || [];
  return { rows, points, routes };
}

function mean(points, what) {
  return points.reduce((sum, point) => sum + point[what], 0) / points.length;
}

function uncross(rows) {
  const number = (row) => row.forEach((point, place) => { point.place = place; });
  rows.forEach(number);
  for (let round = 0; round < 20; round++) {
    const down = round % 2 === 0;
    for (const row of down ? rows : [...rows].reverse()) {
      const side = down ? "above" : "below";
      for (const point of row) point.wish = point[side].length ? mean(point[side], "place") : point.place;
      row.sort((a, b) => a.wish - b.wish || a.place - b.place);
      number(row);
    }
  }
}

// The least distance between the middles of two neighbours in a row.
function apart(one, next) {
  return (one.width + next.width) / 2 + (one.id || next.id ? CELL.gap : BEND.gap);
}

// Places as near to the wishes as order and distances allow: least squares by pooling neighbours.
function settle(row, wish) {
  const blocks = [];
  let offset = 0;
  row.forEach((point, index) => {
    if (index) offset += apart(row[index - 1], point);
    point.offset = offset;
    const heavy = point.id ? 1 : 3; // passing arrows stay straight
    let block = { sum: (wish(point) - offset) * heavy, weight: heavy, points: [point] };
    while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].weight > block.sum / block.weight) {
      const before = blocks.pop();
      block = {
        sum: before.sum + block.sum, weight: before.weight + block.weight, points: before.points.concat(block.points),
      };
    }
    blocks.push(block);
  });
  for (const block of blocks) for (const point of block.points) point.x = block.sum / block.weight + point.offset;
}

function spread(rows) {
  let widest = 0;
  for (const row of rows) {
    const length = row.reduce((sum, point, index) => sum + (index ? apart(row[index - 1], point) : 0), 0);
    widest = Math.max(widest, length);
    row.forEach((point, index) => {
      point.x = index ? row[index - 1].x + apart(row[index - 1], point) : -length / 2;
    });
  }
  for (let round = 0; round < 14; round++) {
    const down = round % 2 === 0;
    for (const row of down ? rows : [...rows].reverse()) {
      settle(row, (point) => {
        const sides = round < 10 ? point[down ? "above" : "below"] : [...point.above, ...point.below];
        const wish = sides.length ? mean(sides, "x") : point.x;
        return Math.max(-widest / 2, Math.min(widest / 2, wish)); // no row drifts out beside the widest one
      });
    }
  }
}

// How far down the middle of each row is: a row is as high as its highest cell.
function middlesOf(rows, cells) {
  const gap = cells.size < MANY ? ROW.near : ROW.far;
  let top = 0;
  return rows.map((row) => {
    const height = Math.max(0, ...row.filter((point) => point.id).map((point) => cells.get(point.id).height));
    top += height + gap;
    return top - gap - height / 2;
  });
}

// The cells at the other ends of arrows, but not a module that this one is in, or that is in it: they belong together.
function others(cell, side) {
  return [...cell[side].keys()].filter((id) => !id.startsWith(`${cell.id}.`) && !cell.id.startsWith(`${id}.`));
}

// Modules that all need each other get the same number (strongly connected components, after Kosaraju).
function numberCircles(cells) {
  const order = [];
  const seen = new Set();
  for (const root of cells.keys()) {
    if (seen.has(root)) continue;
    seen.add(root);
    const path = [[root, others(cells.get(root), "needs").values()]];
    while (path.length) {
      const [id, left] = path[path.length - 1];
      const next = left.next();
      if (next.done) {
        order.push(id);
        path.pop();
      } else if (!seen.has(next.value)) {
        seen.add(next.value);
        path.push([next.value, others(cells.get(next.value), "needs").values()]);
      }
    }
  }
  const left = new Set(order);
  let circles = 0;
  for (const first of order.reverse()) {
    if (!left.delete(first)) continue;
    const circle = [first];
    for (const id of circle) for (const user of others(cells.get(id), "users")) if (left.delete(user)) circle.push(user);
    if (circle.length > 1) {
      circles += 1;
      for (const id of circle) cells.get(id).circle = circles;
    }
  }
}

// Places every cell (x, y: its middle) and returns the arrows: {from, to, points, extra}. An extra arrow is
// one that a longer way already implies.
function layOut(cells) {
  if (!cells.size) return [];
  const needs = acyclicNeeds(cells);
  const { order, users } = topological(needs);
  const kept = withoutShortcuts(needs, order);
  const { rows, points, routes } = pointsOf(kept, rowsOf(needs, users, order));
  uncross(rows);
  spread(rows);
  const middles = middlesOf(rows, cells);
  for (const [id, point] of points) Object.assign(cells.get(id), { x: point.x, y: middles[point.at] });
  const arrows = routes.map(({ from, to, way }) => ({
    from, to, extra: false, points: way.map((point) => [point.x, middles[point.at]]),
  }));
  const drawn = new Set(arrows.map((arrow) => `${arrow.from} ${arrow.to}`));
  for (const cell of cells.values()) {
    for (const need of cell.needs.keys()) {
      if (drawn.has(`${cell.id} ${need}`)) continue;
      const other = cells.get(need);
      arrows.push({ from: cell.id, to: need, extra: true, points: [[other.x, other.y], [cell.x, cell.y]] });
    }
  }
  return arrows;
}
