// The content of the page, and how numbers and names are written.
const R = JSON.parse(document.getElementById("data").textContent);

function unpackNames([shared, rest]) {
  const names = new Array(rest.length);
  let last = "";
  for (let i = 0; i < rest.length; i++) names[i] = last = last.slice(0, shared[i]) + rest[i];
  return names;
}

R.names = unpackNames(R.names);
R.count = R.names.length;
R.bad = new Set(R.unreadable || []);

const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];

function sizeText(bytes) {
  let unit = 0;
  while (bytes >= 999.5 && unit < UNITS.length - 1) { bytes /= 1000; unit++; }
  return `${unit ? bytes.toPrecision(3) : Math.round(bytes)} ${UNITS[unit]}`;
}

const GROUPED = new Intl.NumberFormat("en");
function countText(count) { return count === null || count === undefined ? "" : GROUPED.format(count); }
function plural(count, noun) { return `${countText(count)} ${noun}${count === 1 ? "" : "s"}`; }

function numberText(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return GROUPED.format(value);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(3) : Number(value.toPrecision(5)).toString();
}

function shareText(share) {
  if (!(share > 0)) return "0 %";
  return share < 0.001 ? share.toExponential(1) : `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
}

function shapeText(shape) { return shape.length ? shape.join(" × ") : "scalar"; }
function product(shape) { return shape.reduce((all, size) => all * size, 1); }

// How many parameters a tensor holds: more than its elements where they are packed.
function parametersOf(i) {
  const known = R.parameters && R.parameters[i];
  return known === undefined ? product(R.shapes[R.shape[i]]) : known;
}

// The same type has the same colour in every report.
function typeColour(name) {
  if (name.startsWith("float8")) return "--c-float8";
  if (["bfloat16", "float16", "float32", "float64", "bool"].includes(name)) return `--c-${name}`;
  return name.startsWith("complex") ? "--c-complex" : "--c-integer";
}

// A name in parts, such as layer 12 of "model.layers", and the kind "self_attn.q_proj.weight".
// The first number is the layer; further numbers, as those of experts, become one kind.
function splitLayer(name) {
  const words = name.split(".");
  const at = words.findIndex((word) => /^\d{1,9}$/.test(word));
  if (at < 0) return { block: "", layer: -1, kind: name };
  const kind = words.slice(at + 1).map((word) => (/^\d{1,9}$/.test(word) ? "*" : word)).join(".");
  return { block: words.slice(0, at).join("."), layer: Number(words[at]), kind: kind || words[at - 1] || "" };
}

// Sums of the tensors of each layer and kind, by block of layers. `skip` leaves tensors out.
function groupLayers(skip) {
  const blocks = new Map();
  const single = [];
  for (let i = 0; i < R.count; i++) {
    if (skip(i)) continue;
    const { block, layer, kind } = splitLayer(R.names[i]);
    if (layer < 0) { single.push(i); continue; }
    if (!blocks.has(block)) blocks.set(block, { layers: new Map(), kinds: new Map() });
    const found = blocks.get(block);
    if (!found.kinds.has(kind)) found.kinds.set(kind, found.kinds.size);
    if (!found.layers.has(layer)) found.layers.set(layer, new Map());
    const row = found.layers.get(layer);
    if (!row.has(kind)) row.set(kind, []);
    row.get(kind).push(i);
  }
  return { blocks, single };
}
