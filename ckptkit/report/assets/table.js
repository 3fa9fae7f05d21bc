// The table of tensors: search, sort, and only the rows that can be seen.
const ROW = 27, SPARE = 12, PRINTED = 200;

// columns: { key, title, number, width, value(i) to sort by, text(i), bad(i) }
function tensorTable(columns, { first, open, isBad, hint, filters }) {
  const state = { order: [], sort: null, down: false, query: "", filter: "all", at: 0, chosen: -1 };
  const longest = R.names.reduce((most, text) => Math.max(most, text.length), 0);
  const named = Math.max(13, Math.min(34, longest * 0.5 + 1.6)); // rem, of the column of names
  const template = [`minmax(min(${named}rem, 62vw), 1fr)`, ...columns.slice(1).map(({ width }) => `${width}rem`)].join(" ");
  const total = columns.slice(1).reduce((all, { width }) => all + width, 0);
  const layout = { "grid-template-columns": template, "min-width": `calc(min(${named}rem, 62vw) + ${total}rem)` };
  const body = make("div", { class: "body", role: "rowgroup" });
  const found = make("span", { class: "hint", "aria-live": "polite" });
  const heads = columns.map((column, at) => {
    const button = make("button", { type: "button", onclick: () => sortBy(at) });
    return make("span", { role: "columnheader", class: column.number ? "number" : null, "aria-colindex": at + 1 }, button);
  });
  const head = make("div", { class: "row head", role: "row", "aria-rowindex": 1, css: layout }, heads);
  const grid = make("div", { class: "grid", role: "grid", "aria-label": "Tensors", "aria-colcount": columns.length, tabindex: "-1" },
    make("div", { role: "rowgroup" }, head), body);
  const lowered = R.names.map((text) => text.toLowerCase());

  // Words that all have to be in the name; a star stands for any text.
  function matcher(query) {
    const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      if (!word.includes("*")) return (text) => text.includes(word);
      const pattern = new RegExp(word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*"));
      return (text) => pattern.test(text);
    });
    return (i) => tests.every((test) => test(lowered[i]));
  }
  function arrange() {
    const matches = matcher(state.query), passes = (filters.find(([key]) => key === state.filter) || filters[0])[2];
    const order = [];
    for (let i = 0; i < R.count; i++) if (passes(i) && matches(i)) order.push(i);
    if (state.sort !== null) {
      const { value } = columns[state.sort], sign = state.down ? -1 : 1;
      const keys = new Map(order.map((i) => [i, value(i)]));
      order.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        const lacks = (x === null || x === undefined ? 1 : 0) - (y === null || y === undefined ? 1 : 0);
        if (lacks) return lacks; // what has no value comes last in both directions
        return (x < y ? -1 : x > y ? 1 : 0) * sign || a - b;
      });
    }
    state.order = order;
    state.at = 0;
    grid.setAttribute("aria-rowcount", order.length + 1);
    found.textContent = order.length === R.count ? plural(R.count, "tensor") : `${countText(order.length)} of ${plural(R.count, "tensor")}`;
    body.style.height = `${order.length * ROW}px`;
    heads.forEach((node, at) => {
      const isSorted = at === state.sort;
      node.setAttribute("aria-sort", isSorted ? (state.down ? "descending" : "ascending") : "none");
      node.firstChild.textContent = `${columns[at].title}${isSorted ? (state.down ? " ▾" : " ▴") : ""}`;
    });
    grid.scrollTop = 0;
    paint(true);
  }
  function sortBy(at) {
    if (state.sort !== at) { state.sort = at; state.down = Boolean(columns[at].number); }
    else if (state.down === Boolean(columns[at].number)) state.down = !state.down;
    else state.sort = null; // the third time, the order of the checkpoint
    arrange();
  }
  let shown = [-1, -1];
  function paint(anew) {
    const tall = grid.clientHeight || 540;
    const from = Math.max(0, Math.floor(grid.scrollTop / ROW) - SPARE);
    const to = Math.min(state.order.length, Math.ceil((grid.scrollTop + tall) / ROW) + SPARE);
    if (!anew && from === shown[0] && to === shown[1]) return;
    shown = [from, to];
    showRows(from, to);
  }
  function showRows(from, to) {
    const hadFocus = body.contains(document.activeElement);
    const rows = [];
    for (let at = from; at < to; at++) rows.push(row(at));
    body.replaceChildren(...rows);
    if (hadFocus) focusRow(false);
  }
  function row(at) {
    const i = state.order[at];
    const cells = columns.map((column, number) => {
      const text = column.text(i);
      const bad = column.bad && column.bad(i);
      return make("span", { role: "gridcell", "aria-colindex": number + 1, class: `${column.number ? "number" : ""}${bad ? " cell-bad" : ""}`, title: column.key === "name" || column.long ? text : null }, column.key === "name" ? name(text) : text);
    });
    const made = make("div", {
      class: `row${isBad(i) ? " bad" : ""}`, role: "row", "aria-rowindex": at + 2, "aria-selected": i === state.chosen ? "true" : "false",
      tabindex: at === state.at ? "0" : "-1", css: { ...layout, top: `${at * ROW}px` },
    }, cells);
    made.at = at;
    return made;
  }
  function focusRow(moves) {
    const top = state.at * ROW, head = 32;
    if (moves) {
      if (top < grid.scrollTop) grid.scrollTop = top;
      else if (top + ROW + head > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + ROW + head - grid.clientHeight;
      shown = [-1, -1];
      paint(false);
    }
    for (const node of body.children) {
      node.tabIndex = node.at === state.at ? 0 : -1;
      if (node.at === state.at) node.focus({ preventScroll: true });
    }
  }
  grid.addEventListener("scroll", () => requestAnimationFrame(() => paint(false)), { passive: true });
  body.addEventListener("click", (event) => {
    const node = event.target.closest(".row");
    if (node) { state.at = node.at; open(state.order[node.at]); }
  });
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(grid.clientHeight / ROW) - 2);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(state.order[state.at]); return; }
    if (step === undefined || !state.order.length) return;
    event.preventDefault();
    state.at = Math.max(0, Math.min(state.order.length - 1, state.at + step));
    focusRow(true);
  });
  const search = make("input", { type: "search", placeholder: "Search names: layers.3 q_proj, or *.mlp.*", "aria-label": "Search names", id: "search", oninput: () => { state.query = search.value; arrange(); } });
  const tools = make("div", { class: "tools" }, search,
    filters.length > 1 ? choice("Only", filters.map(([key, title]) => [key, title]), "all", (value) => { state.filter = value; arrange(); }) : null, found);
  const detail = make("div", { class: "detail", hidden: true, tabindex: "-1" });
  section("tensors", "Tensors", hint, tools, detail, grid);
  if (first !== undefined) { state.sort = first; state.down = Boolean(columns[first].number); }
  arrange();
  addEventListener("resize", () => paint(false));
  addEventListener("beforeprint", () => { body.style.height = `${Math.min(state.order.length, PRINTED) * ROW}px`; showRows(0, Math.min(state.order.length, PRINTED)); });
  addEventListener("afterprint", () => { body.style.height = `${state.order.length * ROW}px`; paint(true); });
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape" && event.target === search && search.value) { search.value = ""; state.query = ""; arrange(); }
  });
  return {
    // Marks a tensor, and shows what is known of it above the table.
    choose(i, content) {
      state.chosen = i;
      const at = state.order.indexOf(i);
      if (at >= 0) {
        state.at = at;
        const top = at * ROW;
        if (top < grid.scrollTop || top + ROW * 2 > grid.scrollTop + grid.clientHeight) grid.scrollTop = Math.max(0, top - grid.clientHeight / 3);
      }
      shown = [-1, -1];
      paint(true);
      detail.hidden = i < 0;
      detail.replaceChildren(...content);
    },
    search(text) { search.value = text; state.query = text; arrange(); },
    reveal() { (detail.hidden ? grid : detail).scrollIntoView({ block: "start" }); detail.focus({ preventScroll: true }); },
  };
}
