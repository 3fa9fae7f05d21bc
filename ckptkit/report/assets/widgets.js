// Small pieces that sections are made of: elements, sections, the tip, links, the theme.
const SVG = "http://www.w3.org/2000/svg";

// Text always becomes a text node, never markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
function make(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function draw(tag, attributes, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }
function name(text) { return make("bdi", { class: "name" }, text); }

function section(id, title, hint, ...children) {
  const head = make("h2", { id: `${id}-title` }, title);
  const made = make("section", { id, "aria-labelledby": `${id}-title` }, head, hint && make("p", { class: "hint" }, hint), ...children);
  document.getElementById("top").append(made);
  document.getElementById("nav").append(make("a", { href: `#${id}` }, title));
  return made;
}

function choice(label, options, value, change) {
  const select = make("select", { onchange: () => change(select.value) },
    options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)));
  return make("label", {}, label, select);
}

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - wide - 8))}px`;
  tip.style.top = `${y + 18 + tall > innerHeight ? Math.max(4, y - tall - 10) : y + 18}px`;
}
function hideTip() { tip.hidden = true; }
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", hideTip, { passive: true, capture: true });

// Shows a text for whatever is under the pointer, as `find` says for an event's target.
function tipped(node, find) {
  node.addEventListener("pointermove", (event) => {
    const text = find(event);
    if (text) showTip(text, event.clientX, event.clientY); else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
}

function variable(key) { return getComputedStyle(document.documentElement).getPropertyValue(key).trim(); }
const RAMP = ["--r0", "--r1", "--r2", "--r3", "--r4", "--r5"];

// The colour of a value from 0 to 1, between the colours of the ramp.
function rampColour(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return `color-mix(in srgb, var(${RAMP[low + 1]}) ${Math.round(100 * (at - low))}%, var(${RAMP[low]}))`;
}
function rampLegend(low, high) {
  const ramp = make("span", { class: "ramp", "aria-hidden": "true" }, RAMP.map((key) => make("i", { css: { background: `var(${key})` } })));
  return make("span", { class: "scale" }, low, ramp, high);
}
function swatch(colour, text) { return make("li", {}, make("i", { css: { background: colour } }), text); }

// Links name what they show, so that a page can be sent to a colleague at the right place.
function linkTo(kind, value) { return `#${kind}=${encodeURIComponent(value)}`; }
function readLink() {
  const found = /^#(tensor|module)=(.*)$/s.exec(location.hash);
  if (!found) return null;
  try { return { kind: found[1], value: decodeURIComponent(found[2]) }; } catch { return null; }
}

// Both work from a file as well; a browser that has no storage for files keeps nothing.
function stored(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch { /* the choice lasts as long as the page */ }
  return null;
}
const darkness = matchMedia("(prefers-color-scheme: dark)");
const themeListeners = [];
let theme = stored("ckptkit-theme") || "auto";
function applyTheme() {
  const isDark = theme === "dark" || (theme === "auto" && darkness.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  for (const listen of themeListeners) listen();
}
darkness.addEventListener("change", applyTheme);
addEventListener("beforeprint", () => { // on paper, whatever the screen has
  document.documentElement.dataset.theme = "light";
  for (const listen of themeListeners) listen();
});
addEventListener("afterprint", applyTheme);
applyTheme();
function themeSwitch() {
  return make("span", { class: "theme" }, choice("", [["auto", "Theme: system"], ["light", "Light"], ["dark", "Dark"]], theme, (value) => {
    theme = value;
    stored("ckptkit-theme", value);
    applyTheme();
  }));
}

// Calls `render` with the width of a node, now and whenever that changes.
function onWidth(node, render) {
  let last = 0;
  const measure = () => {
    const width = Math.floor(node.clientWidth);
    if (width && width !== last) { last = width; render(width); }
  };
  measure();
  // Later: a change of size while sizes are reported would be reported as an error.
  new ResizeObserver(() => requestAnimationFrame(measure)).observe(node);
}
