// The steps of a run: sizes and world sizes, and each metric that was saved with them.
const CHART = { height: 150, top: 18, bottom: 34, left: 58, right: 10 };

function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((one) => one >= raw);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(at * step);
  return ticks;
}

function chartFrame(width, label, steps, low, high, write) {
  const { height, top, bottom, left, right } = CHART;
  const x = (at) => left + ((at + 0.5) * (width - left - right)) / steps.length;
  const y = (value) => (high > low ? height - bottom - ((value - low) / (high - low)) * (height - top - bottom) : (height - bottom + top) / 2);
  const svg = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  for (const tick of niceTicks(low, high, 3)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, write(tick)));
  }
  const each = Math.ceil((steps.length * 46) / (width - left - right));
  steps.forEach((step, at) => {
    if (at % each === 0) svg.append(draw("text", { x: x(at), y: height - bottom + 14, "text-anchor": "middle" }, countText(step.step)));
  });
  return { svg, x, y };
}

function stepText(step) {
  const state = step.complete ? "complete" : `incomplete: ${step.problem}`;
  return [`${step.name}, ${state}`, sizeText(step.bytes), step.ranks ? plural(step.ranks, "rank") : "", step.at ? `${step.at} UTC` : ""].filter(Boolean).join("\n");
}

function sizeChart(width, steps) {
  const most = Math.max(...steps.map((step) => step.bytes), 1);
  const { svg, x, y } = chartFrame(width, "Size of each step", steps, 0, most, sizeText);
  const wide = Math.max(2, Math.min(34, ((width - CHART.left - CHART.right) / steps.length) * 0.7));
  let last = null, free = 0; // where the next label of ranks fits
  steps.forEach((step, at) => {
    const bar = draw("rect", { class: `step${step.complete ? "" : " bad"}${step.shown ? " shown" : ""}`, x: x(at) - wide / 2, y: y(step.bytes), width: wide, height: Math.max(y(0) - y(step.bytes), 1.5) });
    bar.tip = stepText(step);
    svg.append(bar);
    if (!step.complete) svg.append(draw("text", { x: x(at), y: y(step.bytes) - 4, "text-anchor": "middle", fill: "var(--bad)" }, "!"));
    const left = Math.max(x(at) - wide / 2, CHART.left);
    if (step.ranks && step.ranks !== last && left >= free) {
      svg.append(draw("text", { x: left, y: CHART.height - 5 }, plural(step.ranks, "rank")));
      last = step.ranks;
      free = left + 52;
    }
  });
  tipped(svg, (event) => event.target.tip);
  return svg;
}

function metricChart(width, steps, at, title) {
  const values = steps.map((step) => step.metrics[at]);
  const known = values.filter((value) => value !== null);
  const { svg, x, y } = chartFrame(width, `${title} by step`, steps, Math.min(...known), Math.max(...known), numberText);
  const points = values.flatMap((value, n) => (value === null ? [] : [[x(n), y(value), n]]));
  svg.append(draw("polyline", { class: "line", points: points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ") }));
  for (const [px, py, n] of points) {
    const dot = draw("circle", { class: `dot${steps[n].best ? " best" : ""}`, cx: px, cy: py, r: points.length > 60 ? 1.6 : steps[n].best ? 4.5 : 3 });
    dot.tip = `${title}: ${numberText(values[n])}\n${steps[n].name}${steps[n].best ? ", the best of the Trainer" : ""}`;
    svg.append(dot);
  }
  tipped(svg, (event) => event.target.tip);
  return svg;
}

function stepTable(run) {
  const shown = run.metrics.slice(0, 6);
  const hasRanks = run.steps.some((step) => step.ranks);
  return make("div", { class: "scroll" }, make("table", { class: "data" },
    make("thead", {}, make("tr", {}, ["step", "state", "saved (UTC)"].map((text) => make("th", { scope: "col" }, text)),
      make("th", { scope: "col", class: "number" }, "size"), hasRanks && make("th", { scope: "col", class: "number" }, "ranks"),
      shown.map((metric) => make("th", { scope: "col", class: "number" }, name(metric))))),
    make("tbody", {}, [...run.steps].reverse().slice(0, 200).map((step) => make("tr", {},
      make("td", {}, name(step.name), step.shown ? " (this page)" : ""),
      make("td", { class: step.complete ? null : "bad-text" }, step.complete ? "complete" : `incomplete: ${step.problem}`,
        step.best ? make("span", { class: "good-text" }, ", best") : "", step.pushed ? ", pushed" : ""),
      make("td", {}, step.at),
      make("td", { class: "number" }, sizeText(step.bytes)),
      hasRanks && make("td", { class: "number" }, countText(step.ranks)),
      shown.map((_, at) => make("td", { class: "number" }, numberText(step.metrics[at]))))))));
}

function runSection() {
  const { run } = R;
  const complete = run.steps.filter((step) => step.complete).length;
  const sizes = make("div", {}), metrics = make("div", { class: "charts" });
  const known = run.metrics.map((title, at) => [title, at]).filter(([, at]) => run.steps.some((step) => step.metrics[at] !== null));
  section("run", "Run",
    `${plural(run.steps.length, "step")}, ${countText(complete)} complete, ${sizeText(run.bytes)} together.${run.left_out ? ` ${plural(run.left_out, "older step")} not shown.` : ""} A dashed red bar is an incomplete step.`,
    make("p", {}, name(run.location)), sizes, metrics,
    make("details", { open: run.steps.length <= 12 }, make("summary", {}, "All steps"), stepTable(run)),
    run.notes.length ? make("ul", { class: "plain" }, run.notes.map((note) => make("li", {}, note))) : "");
  onWidth(sizes, (width) => {
    sizes.replaceChildren(sizeChart(width, run.steps));
    const each = Math.max(230, Math.floor((width - 24) / Math.max(1, Math.min(3, Math.floor(width / 290)))) - 8);
    metrics.replaceChildren(...known.slice(0, 12).map(([title, at]) => make("div", {}, make("h3", {}, name(title)), metricChart(each, run.steps, at, title))));
  });
}
