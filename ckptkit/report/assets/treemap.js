// Parameters as nested rectangles by module, each as large as its bytes.
const LEAST_SIDE = 3, HEADER = 17, MOST_BOXES = 1600, LEAST_NESTED = 46;

// A tree of modules. A module with one child is joined with it.
function growTree(indexes, title) {
  const root = { name: title, path: "", size: 0, count: 0, bad: 0, kids: new Map(), types: new Map(), tensor: -1 };
  const add = (node, i) => {
    node.size += R.bytes[i]; node.count++; node.bad += R.bad.has(i) ? 1 : 0;
    node.types.set(R.dtype[i], (node.types.get(R.dtype[i]) || 0) + R.bytes[i]);
  };
  for (const i of indexes) {
    let node = root;
    const words = R.names[i].split(".");
    add(root, i);
    words.forEach((word, depth) => {
      const isLeaf = depth === words.length - 1;
      const key = isLeaf ? `=${word}` : word; // a module and a tensor can have one name
      let kid = node.kids.get(key);
      if (!kid) {
        const path = node.path ? `${node.path}.${word}` : word;
        kid = { name: word, path, size: 0, count: 0, bad: 0, kids: new Map(), types: new Map(), tensor: -1, up: node };
        node.kids.set(key, kid);
      }
      add(kid, i);
      if (isLeaf) kid.tensor = i;
      node = kid;
    });
  }
  const join = (node) => {
    while (node.up && node.kids.size === 1) {
      const only = node.kids.values().next().value;
      node.name = `${node.name}.${only.name}`;
      node.path = only.path; node.kids = only.kids; node.tensor = only.tensor;
      for (const kid of node.kids.values()) kid.up = node;
    }
    node.list = [...node.kids.values()].filter((kid) => kid.size > 0).sort((a, b) => b.size - a.size);
    node.list.forEach(join);
  };
  join(root);
  return root;
}

// Bruls, Huizing, van Wijk: "Squarified Treemaps", 2000.
function squarify(kids, x, y, width, height, total) {
  const placed = [];
  const scale = (width * height) / total;
  let row = [], sum = 0, at = 0;
  const worst = (first, last, total, side) => {
    const area = total * scale;
    return Math.max((side * side * first.size * scale) / (area * area), (area * area) / (side * side * last.size * scale));
  };
  const settle = () => {
    const side = Math.min(width, height), depth = (sum * scale) / side;
    let offset = 0;
    for (const kid of row) {
      const length = (kid.size * scale) / depth;
      placed.push(width >= height ? [kid, x, y + offset, depth, length] : [kid, x + offset, y, length, depth]);
      offset += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    row = []; sum = 0;
  };
  while (at < kids.length && width > 0 && height > 0) {
    const kid = kids[at], side = Math.min(width, height);
    if (!row.length || worst(row[0], kid, sum + kid.size, side) <= worst(row[0], row[row.length - 1], sum, side)) {
      row.push(kid); sum += kid.size; at++;
    } else settle();
  }
  if (row.length && width > 0 && height > 0) settle();
  return placed;
}

function treemapSection() {
  const parts = R.trees.map(([tree, part], number) => [String(number), tree ? `${tree} (${part})` : part]);
  const indexes = (chosen) => [...Array(R.count).keys()].filter((i) => chosen === "all" || String(R.tree[i]) === chosen);
  const model = R.trees.findIndex(([, part]) => part === "model");
  let chosen = parts.length > 1 && model >= 0 ? String(model) : "all";
  let root = growTree(indexes(chosen), "all");
  let current = root, focus = null, width = 0, painted = "dtype", range = null;
  const measures = layerMeasures();
  const crumbs = make("div", { class: "crumbs", "aria-label": "Path" });
  const picture = draw("svg", { class: "tree", role: "tree", "aria-label": "Parameters by module" });
  const holder = make("div", {}, picture);
  const legend = make("ul", { class: "legend" });
  const tools = make("div", { class: "tools" });
  if (parts.length > 1) {
    tools.append(choice("State dict", [["all", "all of them"], ...parts], chosen, (value) => {
      chosen = value; root = current = growTree(indexes(chosen), "all"); focus = null; paintBy(painted); render();
    }));
  }
  if (R.stats) {
    const ways = Object.entries(measures).filter(([key]) => key !== "size").map(([key, { title }]) => [key, title]);
    tools.append(choice("Colour", ways, painted, (value) => { paintBy(value); render(); }));
  }

  const textOf = (node) => {
    const share = ` (${shareText(node.size / (root.size || 1))})`;
    const what = node.tensor >= 0 ? `${R.dtypes[R.dtype[node.tensor]]} ${shapeText(R.shapes[R.shape[node.tensor]])}` : plural(node.count, "tensor");
    const bad = node.bad ? `\n${node.tensor >= 0 ? "cannot be read whole" : `${countText(node.bad)} cannot be read whole`}` : "";
    return `${node.path || node.name}\n${sizeText(node.size)}${share}, ${what}${bad}`;
  };

  function open(node, moves) {
    if (node.tensor >= 0) { location.hash = linkTo("tensor", R.names[node.tensor]); return; }
    current = node; focus = node.list[0];
    render();
    if (moves) focusOn(focus);
  }
  function focusOn(node) {
    if (!node || !node.box) return;
    if (focus && focus.box) focus.box.setAttribute("tabindex", "-1");
    focus = node;
    node.box.setAttribute("tabindex", "0");
    node.box.focus({ preventScroll: true });
    const place = node.box.getBoundingClientRect();
    showTip(textOf(node), place.left, Math.min(place.top + 20, innerHeight - 120));
  }
  function onKey(event) {
    const shown = focus && focus.up ? focus.up.list.filter((kid) => kid.box) : [];
    const at = shown.indexOf(focus);
    const moves = {
      ArrowRight: () => focusOn(shown[Math.min(at + 1, shown.length - 1)]),
      ArrowLeft: () => focusOn(shown[Math.max(at - 1, 0)]),
      ArrowDown: () => focusOn(focus.list.find((kid) => kid.box)),
      ArrowUp: () => { if (focus.up !== current) focusOn(focus.up); },
      Home: () => focusOn(shown[0]),
      End: () => focusOn(shown[shown.length - 1]),
      Enter: () => open(focus, true),
      " ": () => open(focus, true),
      Backspace: () => { if (current.up) { const left = current; current = current.up; render(); focusOn(left); } },
    };
    if (!focus || !moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moves[event.key]();
  }

  let boxes = 0, waiting = [];
  function label(group, node, x, y, w, isModule) {
    const room = Math.floor((w - 8) / 6.7);
    if (room < 3) return;
    const short = node.name.replace(/\.weight$/, "");
    const text = short.length <= room ? short : `${short.slice(0, room - 1)}…`;
    group.append(draw("text", { x: x + 4, y: y + 12.5, class: "n" }, text));
    const size = sizeText(node.size);
    if (isModule && room > text.length + size.length + 2) {
      group.append(draw("text", { x: x + w - 4, y: y + 12.5, "text-anchor": "end" }, size));
    }
  }
  function place(parent, node, x, y, w, h, depth) {
    const isModule = node.tensor < 0;
    const group = draw("g", {
      role: "treeitem", tabindex: "-1", class: `${isModule ? "m" : "t"}${node.bad && !isModule ? " bad" : ""}`,
      "aria-label": textOf(node).replace("\n", ", "), "aria-level": String(depth), "aria-expanded": isModule ? "true" : null,
    });
    const rect = draw("rect", { class: "hit", x: x.toFixed(1), y: y.toFixed(1), width: Math.max(w, 0.5).toFixed(1), height: Math.max(h, 0.5).toFixed(1), rx: w > 20 && h > 12 ? 2 : 0 });
    group.append(rect);
    node.box = group;
    group.node = node;
    parent.append(group);
    boxes++;
    if (h > 15) label(group, node, x, y, w, isModule);
    // What is not opened, being too small, is painted as a whole.
    rect.style.fill = colourOf(node);
    if (isModule && w > LEAST_NESTED && h > HEADER + 12) waiting.push([group, rect, node, x + 3, y + HEADER, w - 6, h - HEADER - 3, depth + 1]);
  }
  // Opens modules level by level: all of a level, or none, so that equals look alike.
  function nestAll() {
    while (waiting.length) {
      const level = waiting;
      waiting = [];
      if (boxes + level.reduce((all, [, , node]) => all + node.list.length, 0) > MOST_BOXES) break;
      for (const [group, rect, node, ...box] of level) { rect.style.fill = ""; nest(group, node, ...box); }
    }
    waiting = [];
  }
  function nest(parent, node, x, y, w, h, depth) {
    const inner = draw("g", { role: "group" });
    for (const [kid, left, top, wide, tall] of squarify(node.list, x, y, w, h, node.size)) {
      if (wide >= LEAST_SIDE && tall >= LEAST_SIDE) place(inner, kid, left, top, wide, tall, depth);
    }
    parent.append(inner);
  }
  function tensorsOf(node) { return node.tensor >= 0 ? [node.tensor] : node.list.flatMap(tensorsOf); }
  // The element type that most of the bytes have, or a number on the ramp.
  function colourOf(node) {
    if (!range) return `var(${typeColour(R.dtypes[[...node.types].sort((a, b) => b[1] - a[1])[0][0]])})`;
    const value = measures[painted].value(tensorsOf(node));
    return value === null ? "var(--empty)" : rampColour(shareOf(value, range));
  }
  function paintBy(key) {
    painted = key;
    const values = measures[key].typed ? [] : indexes(chosen).map((i) => measures[key].value([i])).filter((value) => value !== null);
    range = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : null;
  }
  function clear(node) { node.box = null; node.list.forEach(clear); }
  function render() {
    if (!width) return;
    const height = Math.round(Math.max(300, Math.min(560, width * 0.52)));
    clear(root);
    boxes = 0;
    picture.replaceChildren();
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("width", width);
    picture.setAttribute("height", height);
    if (current.size) { nest(picture, current, 0, 0, width, height, 1); nestAll(); }
    else picture.append(draw("text", { x: 8, y: 24 }, "No tensor has any bytes."));
    focus = focus && focus.box ? focus : current.list.find((kid) => kid.box) || null;
    if (focus) focus.box.setAttribute("tabindex", "0");
    const trail = [];
    for (let node = current; node; node = node.up) trail.unshift(node);
    crumbs.replaceChildren(...trail.flatMap((node, depth) => [
      depth ? make("span", { "aria-hidden": "true" }, "›") : null,
      node === current ? name(node.name) : make("button", { type: "button", onclick: () => open(node, true) }, node.name),
    ]).filter(Boolean), make("span", {}, `${sizeText(current.size)}, ${plural(current.count, "tensor")}`));
    if (range) {
      const write = measures[painted].text || numberText;
      legend.replaceChildren(make("li", {}, measures[painted].title, " ", rampLegend(write(range[0]), write(range[1]))));
    } else legend.replaceChildren(...[...root.types].sort((a, b) => b[1] - a[1]).map(([type, size]) =>
      swatch(`var(${typeColour(R.dtypes[type])})`, `${R.dtypes[type]} ${sizeText(size)}`)));
  }
  picture.addEventListener("keydown", onKey);
  picture.addEventListener("focusout", hideTip);
  const nodeAt = (event) => { const group = event.target.closest("g.m, g.t"); return group && group.node; };
  picture.addEventListener("click", (event) => { const node = nodeAt(event); if (node) open(node, false); });
  tipped(picture, (event) => { const node = nodeAt(event); return node && textOf(node); });
  section("parameters", "Parameters",
    "Each rectangle is a tensor, as large as its bytes, in its module. Click or press Enter to open a module, Backspace to go back; arrow keys move.",
    tools, crumbs, holder, legend);
  onWidth(holder, (now) => { width = now; render(); });
  return {
    show(path) {
      let node = root;
      while (node.path !== path) {
        const kid = node.list.find((one) => one.tensor < 0 && (path === one.path || path.startsWith(`${one.path}.`)));
        if (!kid) break;
        node = kid;
      }
      current = node; focus = null; render();
      return node.path === path;
    },
  };
}
