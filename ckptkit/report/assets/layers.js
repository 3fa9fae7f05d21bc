// Tables of colours: a row for each layer, a column for each kind of tensor in it.
const MOST_ROWS = 400, MOST_KINDS = 80, SHORT = 26;

function shortKind(kind) { return kind.replace(/\.(weight|bias)$/, (_, last) => (last === "bias" ? " bias" : "")); }

// One table. `measure(tensors)` returns a number or null, `textOf(tensors, value)` what a cell is.
function heatTable(title, layers, kinds, measure, settings) {
  const { textOf, colourOf, isBad, byColumn, open } = settings;
  const rows = [...layers.keys()].sort((a, b) => a - b).slice(0, MOST_ROWS);
  const columns = [...kinds.keys()].slice(0, MOST_KINDS);
  const values = rows.map((row) => columns.map((kind) => {
    const tensors = layers.get(row).get(kind);
    return tensors ? { tensors, value: measure(tensors), bad: isBad(tensors) } : null;
  }));
  const spread = (cells) => {
    const found = cells.filter((cell) => cell && cell.value !== null).map((cell) => cell.value);
    return [Math.min(...found), Math.max(...found)];
  };
  const all = spread(values.flat());
  const ranges = columns.map((_, at) => (byColumn ? spread(values.map((row) => row[at])) : all));
  const body = make("tbody", {}, rows.map((row, y) => make("tr", {},
    make("th", { scope: "row" }, layers.titles ? layers.titles.get(row) : String(row)),
    columns.map((kind, x) => {
      const cell = values[y][x];
      if (!cell) return make("td", { class: "none" });
      const text = textOf(kind, row, cell.tensors, cell.value);
      const colour = colourOf ? colourOf(cell.tensors) : cell.value === null ? null : rampColour(shareOf(cell.value, ranges[x]));
      const made = make("td", { tabindex: "-1", class: cell.bad ? "bad" : null, "aria-label": text.replaceAll("\n", ", "), css: colour ? { background: colour } : null }, cell.bad ? "!" : "");
      made.tip = text;
      made.tensors = cell.tensors;
      return made;
    }))));
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }),
    columns.map((kind) => make("th", { scope: "col", title: kind }, make("span", {}, shortKind(kind).length > SHORT ? `…${shortKind(kind).slice(-SHORT)}` : shortKind(kind))))));
  const longest = Math.max(...columns.map((kind) => Math.min(shortKind(kind).length, SHORT + 1)), 4);
  const table = make("table", { class: "heat", "aria-label": title, css: { "--tall": `${(longest * 0.5 + 0.8).toFixed(1)}rem`, "--wide": `${Math.max(1.9, Math.min(4.4, 60 / columns.length)).toFixed(2)}rem` } }, head, body);
  steer(table, open);
  return { node: make("div", { class: "scroll" }, table), range: all, cut: layers.size > MOST_ROWS || kinds.size > MOST_KINDS };
}

// Where a value is between two others; over a wide range by its logarithm.
function shareOf(value, [low, high]) {
  if (!(high > low)) return value > 0 ? 0.5 : 0;
  if (low > 0 && high / low > 30) return Math.log(value / low) / Math.log(high / low);
  return (value - low) / (high - low);
}

// Arrow keys move between cells; one cell is in the order of the Tab key.
function steer(table, open) {
  const first = table.querySelector("td[tabindex]");
  if (first) first.tabIndex = 0;
  const focusOn = (cell) => {
    for (const other of table.querySelectorAll('td[tabindex="0"]')) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
    const at = cell.getBoundingClientRect();
    showTip(cell.tip, at.left, at.top);
  };
  table.addEventListener("keydown", (event) => {
    const cell = event.target.closest("td[tabindex]");
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(cell.tensors); return; }
    if (!step) return;
    event.preventDefault();
    const rows = table.tBodies[0].rows;
    let y = cell.parentNode.rowIndex - 1 + step[0], x = cell.cellIndex + step[1];
    while (rows[y] && rows[y].cells[x]) {
      if (rows[y].cells[x].tensors) { focusOn(rows[y].cells[x]); return; }
      y += step[0]; x += step[1];
    }
  });
  table.addEventListener("click", (event) => { const cell = event.target.closest("td[tabindex]"); if (cell) open(cell.tensors); });
  table.addEventListener("focusout", hideTip);
  tipped(table, (event) => { const cell = event.target.closest("td[tabindex]"); return cell && cell.tip; });
}

// Tables for all blocks of layers, and one row for the tensors that are in no layer.
function heatTables(groups, settings) {
  const nodes = [], ranges = [];
  let cut = false;
  for (const [block, { layers, kinds }] of groups.blocks) {
    const made = heatTable(block || "layers", layers, kinds, settings.measure, settings);
    nodes.push(make("h3", {}, name(block || "layers")), made.node);
    ranges.push(made.range); cut = cut || made.cut;
  }
  if (groups.single.length) {
    const row = new Map(groups.single.slice(0, MOST_KINDS).map((i) => [R.names[i], [i]]));
    const layers = new Map([[0, row]]);
    layers.titles = new Map([[0, ""]]);
    const made = heatTable("in no layer", layers, row, settings.measure, settings);
    nodes.push(make("h3", {}, groups.blocks.size ? "In no layer" : "Tensors"), made.node);
    ranges.push(made.range); cut = cut || groups.single.length > MOST_KINDS;
  }
  if (cut) nodes.push(make("p", { class: "hint" }, `At most ${MOST_ROWS} layers and ${MOST_KINDS} kinds are shown; the table of tensors has all.`));
  const low = Math.min(...ranges.map(([from]) => from)), high = Math.max(...ranges.map(([, to]) => to));
  return { nodes, low, high };
}

function sum(tensors, column) {
  let total = 0, known = false;
  for (const i of tensors) if (column[i] !== null && column[i] !== undefined) { total += column[i]; known = true; }
  return known ? total : null;
}
function most(tensors, valueOf) {
  const found = tensors.map(valueOf).filter((value) => value !== null && value !== undefined);
  return found.length ? Math.max(...found) : null;
}
function norm(tensors, column) {
  let total = 0, known = false;
  for (const i of tensors) if (column[i] !== null && column[i] !== undefined) { total = Math.hypot(total, column[i]); known = true; }
  return known ? total : null;
}

function openTensors(tensors) { location.hash = linkTo("tensor", R.names[tensors[0]]); }
function tensorText(tensors) { return tensors.length === 1 ? R.names[tensors[0]] : `${R.names[tensors[0]]} and ${plural(tensors.length - 1, "other")}`; }

// What a cell of the page of a checkpoint shows: sizes and types from headers, numbers from stats.
function layerMeasures() {
  const elements = (tensors) => tensors.reduce((all, i) => all + product(R.shapes[R.shape[i]]), 0);
  const measures = {
    dtype: { title: "element type", typed: true, value: () => null, text: () => "" },
    size: { title: "size", value: (tensors) => sum(tensors, R.bytes), text: sizeText },
  };
  const s = R.stats;
  if (!s) return measures;
  const size = (value) => (value === null || value === undefined ? null : Math.abs(value));
  return {
    rms: { title: "root mean square", value: (t) => { const all = norm(t, s.norm); return all === null ? null : all / Math.sqrt(elements(t) || 1); } },
    norm: { title: "norm", value: (t) => norm(t, s.norm) },
    largest: { title: "largest absolute value", value: (t) => most(t, (i) => (s.minimum[i] === null ? null : Math.max(size(s.minimum[i]), size(s.maximum[i])))) },
    mean: { title: "mean, without its sign", value: (t) => most(t, (i) => size(s.mean[i])) },
    zeros: { title: "share of zeros", value: (t) => { const zeros = sum(t, s.zeros); return zeros === null ? null : zeros / (elements(t) || 1); }, text: shareText },
    broken: { title: "NaN and infinite", value: (t) => { const nan = sum(t, s.nan); return nan === null ? null : nan + sum(t, s.infinite); }, text: countText },
    ...measures,
  };
}

function isBroken(i) { return R.bad.has(i) || (R.stats && R.stats.nan && (R.stats.nan[i] > 0 || R.stats.infinite[i] > 0)); }

function layersSection() {
  const model = new Set(R.trees.flatMap(([, part], number) => (part === "model" ? [number] : [])));
  const groups = groupLayers((i) => model.size > 0 && !model.has(R.tree[i]));
  const measures = layerMeasures();
  // Kinds of tensors differ more from one another than layers do.
  let key = Object.keys(measures)[0], byColumn = Boolean(R.stats) && groups.blocks.size > 0;
  const holder = make("div", {}), legend = make("ul", { class: "legend" });
  const render = () => {
    const chosen = measures[key];
    const write = chosen.text || numberText;
    const { nodes, low, high } = heatTables(groups, {
      measure: chosen.value, byColumn, open: openTensors, isBad: (tensors) => tensors.some(isBroken),
      colourOf: chosen.typed ? (tensors) => `var(${typeColour(R.dtypes[R.dtype[tensors[0]]])})` : null,
      textOf: (kind, row, tensors, value) => {
        const types = [...new Set(tensors.map((i) => R.dtypes[R.dtype[i]]))].join(", ");
        const shape = tensors.length === 1 ? ` ${shapeText(R.shapes[R.shape[tensors[0]]])}` : "";
        const number = chosen.typed ? "" : `\n${chosen.title}: ${value === null ? "none" : write(value)}`;
        const bad = tensors.filter(isBroken).map((i) => (R.bad.has(i) ? "cannot be read whole" : `${countText(R.stats.nan[i])} NaN, ${countText(R.stats.infinite[i])} infinite`));
        return `${tensorText(tensors)}\n${types}${shape}, ${sizeText(sum(tensors, R.bytes))}${number}${bad.length ? `\n${bad[0]}` : ""}`;
      },
    });
    holder.replaceChildren(...nodes);
    if (chosen.typed) legend.replaceChildren(...R.dtypes.map((type) => swatch(`var(${typeColour(type)})`, type)));
    else if (Number.isFinite(low)) legend.replaceChildren(make("li", {}, chosen.title, " ", byColumn ? rampLegend("least of the column", "most") : rampLegend(write(low), write(high))));
    else legend.replaceChildren();
  };
  render();
  const hint = R.stats ? "A row for each layer, a column for each kind of tensor. A red frame marks NaN, infinities, and data that cannot be read."
    : "A row for each layer, a column for each kind of tensor. Norms and ranges need --stats, which reads all data.";
  const made = section("layers", "Layers", hint,
    make("div", { class: "tools" },
      choice("Show", Object.entries(measures).map(([value, { title }]) => [value, title]), key, (value) => { key = value; render(); }),
      choice("Scale", [["all", "all together"], ["column", "each column"]], byColumn ? "column" : "all", (value) => { byColumn = value === "column"; render(); })),
    legend, holder);
  return made;
}

// Where two models differ: the norm of the change as a part of the norm in A.
function changeOf(tensors) {
  const change = norm(tensors, R.stats.change), before = norm(tensors, R.stats.norm_a);
  if (change === null) return null;
  if (before) return change / before;
  return change ? Infinity : 0;
}

function differenceLayers() {
  const groups = groupLayers((i) => R.stats.change[i] === null);
  if (!groups.blocks.size && !groups.single.length) return null;
  let byColumn = false;
  const holder = make("div", {}), legend = make("ul", { class: "legend" });
  const measure = (tensors) => { const change = changeOf(tensors); return change === Infinity ? null : change; };
  const render = () => {
    const { nodes, low, high } = heatTables(groups, {
      measure, byColumn, open: openTensors, isBad: (tensors) => tensors.some((i) => R.stats.lone[i] > 0),
      textOf: (kind, row, tensors, value) => {
        const lone = sum(tensors, R.stats.lone);
        const change = value === null ? "zero in A" : `changed by ${shareText(value)} of its norm`;
        return `${tensorText(tensors)}\n${change}\n${countText(sum(tensors, R.stats.unequal))} of ${plural(sum(tensors, R.elements), "element")} differ${lone ? `\n${countText(lone)} finite in one model alone` : ""}`;
      },
    });
    holder.replaceChildren(...nodes);
    const ends = byColumn ? ["least of the column", "most"] : [low, high].map((value) => (value ? shareText(value) : "unchanged"));
    legend.replaceChildren(make("li", {}, "norm of the change ", rampLegend(...ends)));
  };
  render();
  return section("layers", "Layers",
    "How far each tensor has moved: the norm of B − A as a part of the norm of A. A row for each layer, a column for each kind of matrix.",
    make("div", { class: "tools" }, choice("Scale", [["all", "all together"], ["column", "each column"]], "all", (value) => { byColumn = value === "column"; render(); })),
    legend, holder);
}
