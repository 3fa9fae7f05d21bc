// Which ranks wrote, and which files hold, the tensors of each module.
const MOST_COLUMNS = 128, MOST_GROUPS = 64, CELL = 15;

// Tensors in groups, such as the layers of a model, that have some meaning on their own.
function groupModules() {
  const groups = new Map();
  for (let i = 0; i < R.count; i++) {
    const [tree, part] = R.trees[R.tree[i]];
    const words = R.names[i].split(".");
    const at = words.findIndex((word) => /^\d{1,9}$/.test(word));
    const path = at >= 0 ? words.slice(0, at + 1).join(".") : words.slice(0, Math.max(1, words.length - 1)).join(".");
    const prefix = R.trees.length > 1 ? `${tree || part}: ` : "";
    const key = prefix + path;
    if (!groups.has(key)) groups.set(key, { title: key, tensors: [] });
    groups.get(key).tensors.push(i);
  }
  const order = new Intl.Collator("en", { numeric: true });
  const list = [...groups.values()].sort((a, b) => R.tree[a.tensors[0]] - R.tree[b.tensors[0]] || order.compare(a.title, b.title));
  if (list.length <= MOST_GROUPS) return list;
  const joined = [], each = Math.ceil(list.length / MOST_GROUPS);
  for (let at = 0; at < list.length; at += each) {
    const some = list.slice(at, at + each);
    joined.push({ title: some.length > 1 ? `${some[0].title} … ${some[some.length - 1].title}` : some[0].title, tensors: some.flatMap((group) => group.tensors) });
  }
  return joined;
}

// Adds the bytes of tensors to columns; several owners are in one column where there are many.
function addShares(tensors, shares, numbers, columns, owners, into) {
  const counts = new Map(); // most tensors are distributed as many others are
  for (const i of tensors) counts.set(numbers[i], (counts.get(numbers[i]) || 0) + 1);
  for (const [number, count] of counts) {
    const runs = shares[number];
    for (let at = 0; at < runs.length; at += 3) {
      const [first, stop, bytes] = [runs[at], runs[at + 1], runs[at + 2]];
      let from = first;
      while (from < stop) { // one step for each column, not for each owner
        const column = Math.floor((from * columns) / owners);
        const next = Math.min(stop, Math.max(from + 1, Math.ceil(((column + 1) * owners) / columns)));
        into[column] += count * bytes * (next - from);
        from = next;
      }
    }
  }
}

function placementSection() {
  const ways = {};
  const ranks = R.on_ranks.reduce((most, runs) => { for (let at = 1; at < runs.length; at += 3) most = Math.max(most, runs[at]); return most; }, 0);
  if (ranks) ways.ranks = { title: "ranks", one: "rank", owners: ranks, shares: R.on_ranks, numbers: R.on_rank, nameOf: (n) => `rank ${n}` };
  if (R.files.length) ways.files = { title: "files", one: "file", owners: R.files.length, shares: R.in_files, numbers: R.in_file, nameOf: (n) => R.files[n][0] };
  if (!Object.keys(ways).length) return null;
  const groups = groupModules();
  const isMissing = (n) => key === "files" && R.files[n][1] < R.files[n][2];
  let key = ways.ranks && !R.files.some(([, size, needed]) => size < needed) ? "ranks" : "files";
  let width = 0, cursor = [0, 0], cells = [], left = 0, wide = 0, columns = 0;
  const picture = make("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map", "aria-label": "Bytes by module and rank or file; arrow keys move" });
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  const holder = make("div", {}, picture);
  const totals = make("div", {});
  const legend = make("ul", { class: "legend" });

  const ownersOf = (column) => {
    const { owners, nameOf } = ways[key];
    const first = Math.ceil((column * owners) / columns), last = Math.ceil(((column + 1) * owners) / columns) - 1;
    return first >= last ? nameOf(first) : `${nameOf(first)} to ${nameOf(last)}`;
  };
  const textAt = ([row, column]) => `${groups[row].title}\n${ownersOf(column)}: ${sizeText(cells[row][column])}`;

  function count() {
    const { owners, shares, numbers } = ways[key];
    columns = Math.min(owners, MOST_COLUMNS);
    cells = groups.map(({ tensors }) => {
      const row = new Float64Array(columns);
      addShares(tensors, shares, numbers, columns, owners, row);
      return row;
    });
    cursor = [0, 0];
  }
  function paint() {
    const isPlain = ways[key].owners === 1; // a map of one column says nothing
    picture.hidden = legend.hidden = readout.hidden = isPlain;
    if (!width || isPlain) return;
    const dense = devicePixelRatio || 1;
    left = Math.min(Math.max(...groups.map(({ title }) => title.length)) * 6.7 + 12, width * 0.36);
    wide = Math.min(72, (width - left) / columns);
    const [w, h] = [Math.ceil(left + wide * columns), groups.length * CELL + 1];
    picture.width = w * dense; picture.height = h * dense;
    picture.style.width = `${w}px`; picture.style.height = `${h}px`;
    const context = picture.getContext("2d");
    context.scale(dense, dense);
    context.font = "11px ui-monospace, Menlo, Consolas, monospace";
    context.textBaseline = "middle";
    const colours = RAMP.map((one) => variable(one)), bad = variable("--bad"), ink = variable("--muted"), empty = variable("--empty");
    const largest = Math.max(...cells.map((row) => Math.max(...row)), 1);
    const gap = wide > 4 ? 1 : 0;
    cells.forEach((row, y) => {
      context.fillStyle = ink;
      const room = Math.floor((left - 10) / 6.7), { title } = groups[y];
      context.fillText(title.length <= room ? title : `…${title.slice(title.length - room + 1)}`, 0, y * CELL + CELL / 2);
      row.forEach((bytes, x) => {
        context.fillStyle = bytes && columns === ways[key].owners && isMissing(x) ? bad : bytes ? colours[1 + Math.round(Math.sqrt(bytes / largest) * (colours.length - 2))] : empty;
        context.fillRect(left + x * wide, y * CELL, Math.max(wide - gap, 0.6), CELL - 1);
      });
    });
    if (document.activeElement === picture) {
      context.strokeStyle = variable("--focus"); context.lineWidth = 2;
      context.strokeRect(left + cursor[1] * wide, cursor[0] * CELL, Math.max(wide, 3), CELL - 1);
    }
    legend.replaceChildren(make("li", {}, rampLegend("no bytes", sizeText(largest))),
      R.files.some((_, n) => isMissing(n)) ? swatch("var(--bad)", "in a file that is missing or cut short") : "");
  }
  function showTotals() {
    const { owners, nameOf, shares, numbers, one } = ways[key];
    const sums = new Float64Array(owners);
    addShares([...Array(R.count).keys()], shares, numbers, owners, owners, sums);
    const rows = [...sums.keys()];
      rows.sort((a, b) => isMissing(b) - isMissing(a) || (owners > 16 ? sums[b] - sums[a] : a - b));
    const shown = rows.slice(0, 16), most = Math.max(...sums, 1);
    const mean = sums.reduce((a, b) => a + b, 0) / owners;
    totals.replaceChildren(
      make("h3", {}, owners > 16 ? `The ${shown.length} ${one}s with most of ${countText(owners)}` : `Bytes of each ${one}`),
      make("div", { class: "bars" }, shown.flatMap((n) => [
        name(nameOf(n)),
        make("span", { class: `bar${isMissing(n) ? " bad" : ""}` }, make("i", { css: { width: `${(100 * sums[n]) / most}%` } })),
        make("span", { class: `number${isMissing(n) ? " bad-text" : ""}` }, isMissing(n) ? `${R.files[n][1] < 0 ? "missing" : "cut short"}, ${sizeText(sums[n])}` : sizeText(sums[n])),
      ])),
      owners > 1 ? make("p", { class: "hint" }, most < mean * 1.001 ? `All ${key} have the same.` : `On average ${sizeText(mean)}; the most is ${(most / mean).toPrecision(3)} times that.`) : "");
  }
  function render() { count(); paint(); showTotals(); readout.textContent = ""; }

  const cellAt = (event) => {
    const box = picture.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - left) / wide), y = Math.floor((event.clientY - box.top) / CELL);
    return x >= 0 && x < columns && y >= 0 && y < groups.length ? [y, x] : null;
  };
  tipped(picture, (event) => { const cell = cellAt(event); return cell && textAt(cell); });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    cursor = [Math.max(0, Math.min(groups.length - 1, cursor[0] + step[0])), Math.max(0, Math.min(columns - 1, cursor[1] + step[1]))];
    paint();
    readout.textContent = textAt(cursor).replace("\n", ", ");
  });
  picture.addEventListener("focus", paint);
  picture.addEventListener("blur", paint);
  const tools = make("div", { class: "tools" });
  if (Object.keys(ways).length > 1) tools.append(choice("By", Object.entries(ways).map(([value, { title }]) => [value, title]), key, (value) => { key = value; render(); }));
  section("placement", "Ranks and files",
    "How the bytes of each module are distributed: rows are modules, columns are ranks or files. Darker cells have more bytes.",
    tools, legend, holder, readout, totals);
  count();
  showTotals();
  onWidth(holder, (now) => { width = now; paint(); });
  themeListeners.push(paint);
  return {
    // Where one tensor is, in words.
    describe(i) {
      return Object.values(ways).map(({ title, shares, numbers, nameOf }) => {
        const runs = shares[numbers[i]], parts = [];
        for (let at = 0; at < runs.length && parts.length < 12; at += 3) {
          const [first, stop, bytes] = runs.slice(at, at + 3);
          parts.push(stop - first > 1 ? `${nameOf(first)} to ${nameOf(stop - 1)}: ${sizeText(bytes)} each` : `${nameOf(first)}: ${sizeText(bytes)}`);
        }
        if (runs.length / 3 > parts.length) parts.push(`and ${countText(runs.length / 3 - parts.length)} more`);
        return [title, parts];
      }).filter(([, parts]) => parts.length);
    },
  };
}
