// Puts the sections of a page together, for a checkpoint or for two models.
function facts(pairs) {
  return make("dl", { class: "facts" }, pairs.map(([label, text]) => make("div", {}, make("dt", {}, label), make("dd", {}, make("bdi", {}, text)))));
}

function header() {
  const what = R.kind === "inspection" ? "Checkpoint" : "Difference of two models";
  document.getElementById("head").append(
    make("div", {}, make("p", { class: "kicker" }, what), make("h1", {}, make("bdi", {}, R.title))), themeSwitch());
}

function problemsSection() {
  const kinds = new Map();
  for (const [code, , , count] of R.problems) kinds.set(code, (kinds.get(code) || 0) + count);
  const counts = [...kinds].map(([code, count]) => `${countText(count)} ${code}`).join(", ");
  const list = (some) => some.map(([code, where, message, count]) => make("li", {}, make("span", { class: "code" }, code),
    where ? make("bdi", {}, `${where}: `) : "", make("bdi", {}, message), count > 1 ? ` and ${countText(count - 1)} more like it` : ""));
  const total = R.problem_count, shown = R.problems.slice(0, 8), rest = R.problems.slice(8);
  const left = total - R.problems.reduce((all, [, , , count]) => all + count, 0);
  const made = section("problems", plural(total, "problem"), `${counts}. consolidate refuses incomplete data; ckptkit verify reads all of it.`,
    make("ul", { class: "plain" }, list(shown)),
    rest.length ? make("details", {}, make("summary", {}, `${countText(rest.length)} more`),
      make("ul", { class: "plain" }, list(rest), left ? make("li", {}, `and ${countText(left)} that this page leaves out`) : "")) : "");
  made.classList.add("bad");
  document.querySelector('nav a[href="#problems"]').classList.add("bad");
}

function splitBar(pairs) {
  const total = pairs.reduce((all, [, size]) => all + size, 0) || 1;
  return [
    make("div", { class: "split", "aria-hidden": "true" }, pairs.map(([, size, colour]) => make("i", { css: { width: `${(100 * size) / total}%`, background: colour } }))),
    make("ul", { class: "legend" }, pairs.map(([title, size, colour]) => swatch(colour, `${title} ${sizeText(size)}, ${shareText(size / total)}`))),
  ];
}

function notesOf() { return R.notes.length ? make("ul", { class: "plain" }, R.notes.map((note) => make("li", {}, make("bdi", {}, note)))) : ""; }

function overviewSection() {
  const sizes = new Map(), elements = { model: 0, optimizer: 0, other: 0 };
  let bytes = 0;
  for (let i = 0; i < R.count; i++) {
    const [tree, part] = R.trees[R.tree[i]];
    sizes.set(R.dtype[i], (sizes.get(R.dtype[i]) || 0) + R.bytes[i]);
    elements[part] += parametersOf(i);
    bytes += R.bytes[i];
  }
  const pairs = [["tensors", countText(R.count)], ["bytes", sizeText(bytes)]];
  if (elements.model) pairs.push(["parameters", countText(elements.model)]);
  const split = [...sizes].sort((a, b) => b[1] - a[1]).map(([type, size]) => [R.dtypes[type], size, `var(${typeColour(R.dtypes[type])})`]);
  const ties = R.ties.map(({ names, equal }) => make("li", {}, names.flatMap((one, at) => [at ? " = " : "", name(one)]),
    equal === true ? " (same bytes)" : equal === false ? make("span", { class: "bad-text" }, " (tied, but the bytes differ)") : " (tied; bytes not compared)"));
  const rows = [];
  if (R.stats) {
    const broken = [...Array(R.count).keys()].filter((i) => R.stats.nan[i] > 0 || R.stats.infinite[i] > 0);
    rows.push(make("p", { class: broken.length ? "bad-text" : "good-text" }, broken.length ? `${plural(broken.length, "tensor")} with NaN or infinite elements, such as ${R.names[broken[0]]}` : "No NaN and no infinite element in the model."));
  }
  section("overview", "Overview", "", facts([...R.facts, ...pairs]), splitBar(split), rows,
    ties.length ? make("div", {}, make("h3", {}, "Tied weights"), make("ul", { class: "plain" }, ties)) : "", notesOf());
}

function numberColumn(key, title, column, width, more) {
  return { key, title, number: true, width: width || 6.4, value: (i) => column[i], text: (i) => numberText(column[i]), ...more };
}

function inspectionPage() {
  if (R.problem_count) problemsSection();
  overviewSection();
  const treemap = treemapSection();
  layersSection();
  const placement = R.on_ranks ? placementSection() : null;
  if (R.run) runSection();
  const typeOf = (i) => R.dtypes[R.dtype[i]], shapeOf = (i) => R.shapes[R.shape[i]];
  const treeOf = (i) => R.trees[R.tree[i]][0] || R.trees[R.tree[i]][1];
  const columns = [
    { key: "name", title: "name", value: (i) => R.names[i], text: (i) => R.names[i] },
    { key: "bytes", title: "size", number: true, width: 6.2, value: (i) => R.bytes[i], text: (i) => sizeText(R.bytes[i]) },
    { key: "dtype", title: "dtype", width: 6.6, value: typeOf, text: typeOf },
    { key: "shape", title: "shape", width: 9, long: true, value: (i) => product(shapeOf(i)), text: (i) => shapeText(shapeOf(i)) },
    { key: "chunks", title: "chunks", number: true, width: 5.4, value: (i) => R.chunks[i], text: (i) => countText(R.chunks[i]) },
  ];
  const labelOf = (i) => R.labels[i] || "";
  if (Object.keys(R.labels).length) columns.push({ key: "label", title: "kind", width: 8, long: true, value: labelOf, text: labelOf });
  if (Object.keys(R.parameters).length) columns.push({ key: "parameters", title: "parameters", number: true, width: 7, value: parametersOf, text: (i) => countText(parametersOf(i)) });
  if (R.trees.length > 1) columns.push({ key: "tree", title: "state dict", width: 8, long: true, value: treeOf, text: treeOf });
  if (R.stats) {
    const widths = { zeros: 6, nan: 4.4, infinite: 4.4 };
    for (const [key, column] of Object.entries(R.stats)) {
      const more = key === "nan" || key === "infinite" ? { bad: (i) => column[i] > 0 } : {};
      columns.push(numberColumn(key, R.titles[key] || key, column, widths[key], more));
    }
  }
  const filters = [["all", "all tensors", () => true]];
  if (R.trees.length > 1) R.trees.forEach(([tree, part], number) => filters.push([`tree${number}`, tree ? `${tree} (${part})` : part, (i) => R.tree[i] === number]));
  for (const role of ["adapter", "base"]) {
    const isOf = (i) => labelOf(i).split(", ")[0] === role;
    if (Object.values(R.labels).some((label) => label.split(", ")[0] === role)) filters.push([role, role, isOf]);
  }
  if (R.bad.size) filters.push(["bad", "cannot be read whole", (i) => R.bad.has(i)]);
  if (R.stats && R.stats.nan.some((count, i) => count > 0 || R.stats.infinite[i] > 0)) filters.push(["nan", "NaN or infinite", isBroken]);
  const table = tensorTable(columns, {
    isBad: isBroken, filters, open: (i) => { location.hash = linkTo("tensor", R.names[i]); },
    hint: "Click a column to sort. Press / to search; arrow keys move, Enter opens.",
  });
  const describe = (i) => {
    const pairs = columns.slice(1).map(({ title, text }) => [title, text(i)]).filter(([, text]) => text);
    if (R.bad.has(i)) pairs.push(["state", "cannot be read whole"]);
    const places = placement ? placement.describe(i) : [];
    return [facts(pairs), ...places.map(([title, parts]) => make("div", {}, make("h3", {}, title), make("ul", { class: "plain" }, parts.map((part) => make("li", {}, name(part))))))];
  };
  return { table, describe, showModule: (path) => treemap.show(path) };
}

function changedSection() {
  const moved = [...Array(R.count).keys()].map((i) => [i, changeOf([i])]).filter(([, change]) => change > 0).sort((a, b) => b[1] - a[1]).slice(0, 20);
  if (!moved.length) return;
  const most = Math.max(...moved.map(([, change]) => (Number.isFinite(change) ? change : 0)), 1e-300);
  section("changed", "Changed most", "The tensors with the largest change, as a part of their norm in A.",
    make("div", { class: "bars" }, moved.flatMap(([i, change]) => [
      make("a", { href: linkTo("tensor", R.names[i]) }, name(R.names[i])),
      make("span", { class: "bar" }, make("i", { css: { width: `${Math.min(100, (100 * change) / most)}%` } })),
      make("span", { class: "number" }, Number.isFinite(change) ? shareText(change) : "zero in A"),
    ])));
}

function listSection(id, title, state) {
  const found = [...Array(R.count).keys()].filter((i) => R.state[i] === state);
  if (!found.length) return;
  const row = (i) => make("li", {}, name(R.names[i]), R.reshaped[i] ? `: ${R.reshaped[i][0]} in A, ${R.reshaped[i][1]} in B` : "");
  section(id, title, plural(found.length, "tensor"), make("ul", { class: "plain" }, found.slice(0, 12).map(row)),
    found.length > 12 ? make("details", {}, make("summary", {}, `${countText(found.length - 12)} more`), make("ul", { class: "plain" }, found.slice(12, 2000).map(row))) : "");
}

function differencePage() {
  section("overview", "Overview", "", make("p", { class: `verdict ${R.same ? "good-text" : "bad-text"}` }, R.same ? "The models are the same." : "The models differ."), facts(R.facts), notesOf());
  if (R.measured) { differenceLayers(); changedSection(); }
  listSection("only-a", "Only in A", 2);
  listSection("only-b", "Only in B", 3);
  listSection("reshaped", "Another shape or dtype", 4);
  const s = R.stats, stateOf = (i) => R.states[R.state[i]];
  const columns = [
    { key: "name", title: "name", value: (i) => R.names[i], text: (i) => R.names[i] },
    { key: "state", title: "state", width: 9.5, value: stateOf, text: stateOf },
    { key: "change", title: "change", number: true, width: 6, value: (i) => changeOf([i]), text: (i) => { const change = changeOf([i]); return change === null ? "" : change === 0 ? "0" : Number.isFinite(change) ? shareText(change) : "zero in A"; } },
    numberColumn("unequal", "differ", s.unequal, 6.4), numberColumn("largest", "largest", s.largest),
    { key: "cosine", title: "cosine", number: true, width: 7.6, value: (i) => s.cosine[i], text: (i) => (s.cosine[i] === null ? "" : s.cosine[i].toFixed(9)) },
    numberColumn("norm_a", "norm A", s.norm_a), numberColumn("norm_b", "norm B", s.norm_b),
    { key: "elements", title: "elements", number: true, width: 7.5, value: (i) => R.elements[i], text: (i) => countText(R.elements[i] || null) },
    { key: "dtype", title: "dtype", width: 8, long: true, value: (i) => R.dtypes[R.dtype[i]].join(), text: (i) => R.dtypes[R.dtype[i]].join(" → ") },
  ].filter(({ key }) => R.measured || !["change", "cosine", "norm_a", "norm_b", "elements", "dtype"].includes(key));
  const filters = [["all", "all tensors", () => true], ["unlike", "those that differ", (i) => R.state[i] > 0],
    ...R.states.map((title, number) => [String(number), title, (i) => R.state[i] === number]).filter(([, , passes]) => R.state.some((_, i) => passes(i)))];
  const table = tensorTable(columns, {
    isBad: (i) => s.lone[i] > 0, filters, first: R.measured ? 2 : undefined, open: (i) => { location.hash = linkTo("tensor", R.names[i]); },
    hint: "Click a column to sort. Press / to search; arrow keys move, Enter opens.",
  });
  const describe = (i) => [facts([
    ...columns.slice(1).map(({ title, text }) => [title, text(i)]).filter(([, text]) => text),
    ["largest relative difference", numberText(s.relative[i])], ...(s.lone[i] ? [["finite in one alone", countText(s.lone[i])]] : []), ...(R.reshaped[i] ? [["A", R.reshaped[i][0]], ["B", R.reshaped[i][1]]] : [])])];
  return { table, describe, showModule: () => false };
}

function follow(page) {
  const link = readLink();
  if (!link) return;
  if (link.kind === "module") {
    if (page.showModule(link.value)) document.getElementById("parameters").scrollIntoView();
    else { page.table.search(`${link.value}.*`); page.table.reveal(); }
    return;
  }
  const i = R.names.indexOf(link.value);
  if (i < 0) return;
  const words = R.names[i].split("."), parent = words.slice(0, -1).join(".");
  const close = make("button", { type: "button", onclick: () => { history.replaceState(null, "", "#tensors"); page.table.choose(-1, []); } }, "Close");
  page.table.choose(i, [
    make("h3", {}, name(R.names[i]), close), ...page.describe(i),
    parent ? make("p", { class: "hint" }, "In module ", make("a", { href: linkTo("module", parent) }, name(parent))) : "",
  ].filter(Boolean));
  page.table.reveal();
}

header();
const page = R.kind === "inspection" ? inspectionPage() : differencePage();
document.body.append(make("footer", {}, `Written by ${R.by}. This page loads nothing and sends nothing.`));
addEventListener("hashchange", () => follow(page));
follow(page);
