(() => {
"use strict";
const $ = (s, e) => (e || document).querySelector(s);
const $$ = (s, e) => Array.from((e || document).querySelectorAll(s));
const tip = $("#tip");

// The numbers of marks stand in their <title>; here they become one tooltip, so that the browser shows no second one.
const texts = new WeakMap();
for (const m of $$("svg.fig .m")) {
  const t = $("title", m);
  if (t) { texts.set(m, t.textContent); t.remove(); }
}
function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const r = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - r.width - 4)) + "px";
  tip.style.top = (y + 16 + r.height > innerHeight ? Math.max(4, y - r.height - 10) : y + 16) + "px";
}
function hide() { tip.hidden = true; }
document.addEventListener("pointermove", e => {
  const m = e.target.closest && e.target.closest("svg.fig .m");
  if (m && texts.has(m)) show(texts.get(m), e.clientX, e.clientY);
  else if (!(e.target.id === "map")) hide();
});
document.addEventListener("pointerdown", e => {
  const m = e.target.closest && e.target.closest("svg.fig .m");
  if (m && texts.has(m)) show(texts.get(m), e.clientX, e.clientY);
});
addEventListener("scroll", hide, {passive: true});

// Arrow keys move over the marks of a figure: to the nearest one in the direction.
for (const svg of $$("svg.fig")) {
  let here = null;
  const center = m => { const r = m.getBoundingClientRect(); return {x: r.left + r.width / 2, y: r.top + r.height / 2}; };
  const go = m => {
    if (here) here.classList.remove("on");
    here = m;
    m.classList.add("on");
    const c = center(m);
    show(texts.get(m) || "", c.x, c.y);
    svg.setAttribute("aria-description", texts.get(m) || "");
  };
  svg.addEventListener("keydown", e => {
    if (e.target !== svg) return;
    const to = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[e.key];
    if (e.key === "Escape") { hide(); return; }
    if (e.key === "Enter" && here) { here.dispatchEvent(new MouseEvent("click", {bubbles: true})); return; }
    if (!to) return;
    const all = $$(".m", svg).filter(m => texts.has(m));
    if (!all.length) return;
    e.preventDefault();
    if (!here) { go(all[0]); return; }
    const a = center(here);
    let best = null, least = Infinity;
    for (const m of all) {
      const b = center(m), along = (b.x - a.x) * to[0] + (b.y - a.y) * to[1], across = Math.abs((b.x - a.x) * to[1]) + Math.abs((b.y - a.y) * to[0]);
      if (m === here || along < 0.5) continue;
      const cost = along + 3 * across;
      if (cost < least) { least = cost; best = m; }
    }
    if (best) go(best);
  });
  svg.addEventListener("blur", () => { if (here) here.classList.remove("on"); here = null; hide(); });
}

// A name in a legend brings out its series.
for (const lg of $$("svg.fig .lg")) {
  const svg = lg.closest("svg"), series = $$(".sr", svg)[Number(lg.dataset.s)];
  lg.setAttribute("tabindex", "0");
  lg.setAttribute("role", "button");
  lg.setAttribute("aria-pressed", "false");
  const toggle = () => {
    const on = !lg.classList.contains("on");
    for (const e of $$(".lg.on,.sr.on", svg)) { e.classList.remove("on"); if (e.hasAttribute("aria-pressed")) e.setAttribute("aria-pressed", "false"); }
    svg.classList.toggle("one", on);
    if (on && series) { lg.classList.add("on"); series.classList.add("on"); lg.setAttribute("aria-pressed", "true"); }
  };
  lg.addEventListener("click", toggle);
  lg.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.stopPropagation(); toggle(); } });
}

// Any figure can be saved as a picture, in the colours of the moment.
function save(canvas, name) {
  const a = document.createElement("a");
  a.href = canvas.toDataURL("image/png");
  a.download = name + ".png";
  a.click();
}
function button(owner, what, name, picture) {
  const b = document.createElement("button");
  b.type = "button";
  b.className = "save";
  b.textContent = "PNG";
  b.setAttribute("aria-label", "Save " + what + " as a PNG file");
  b.addEventListener("click", () => picture(name));
  owner.append(b);
}
for (const svg of $$("figure svg.fig")) {
  button(svg.parentNode, svg.getAttribute("aria-label"), svg.id.slice(4), name => {
    const root = getComputedStyle(document.documentElement), value = v => root.getPropertyValue(v).trim();
    const css = $("style").textContent.split("\n").filter(l => l.startsWith(".fig")).join("\n").replace(/var\((--[a-z0-9]+)\)/g, (_, v) => value(v));
    const copy = svg.cloneNode(true), box = svg.viewBox.baseVal, scale = 3, style = document.createElementNS(svg.namespaceURI, "style");
    style.textContent = css;
    copy.prepend(style);
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    const img = new Image();
    img.onload = () => {
      const c = document.createElement("canvas"), g = c.getContext("2d");
      c.width = Math.round(box.width * scale); c.height = Math.round(box.height * scale);
      g.fillStyle = value("--bg");
      g.fillRect(0, 0, c.width, c.height);
      g.drawImage(img, 0, 0, c.width, c.height);
      save(c, name);
    };
    img.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  });
}

// Of the needle grids the full cache's stays, and one other is chosen.
for (const box of $$(".choices")) {
  const all = $$(".choice", box);
  if (all.length < 3) continue;
  const select = document.createElement("select"), label = document.createElement("label");
  label.className = "pick";
  label.append("Beside the full cache: ", select);
  all.forEach((c, i) => { if (i) select.add(new Option(c.dataset.label, i)); });
  box.prepend(label);
  const update = () => all.forEach((c, i) => c.classList.toggle("off", i > 0 && i !== Number(select.value)));
  select.addEventListener("change", update);
  update();
}

// Tables are open on paper.
addEventListener("beforeprint", () => { for (const d of $$("details")) d.open = true; });

// The attention maps.
const source = $("#map-data");
if (!source) return;
const data = JSON.parse(source.textContent);
const canvas = $("#map"), g = canvas.getContext("2d"), layer = $("#map-layer"), head = $("#map-head"), sample = $("#map-sample"), text = $("#map-text");
const bytes = data.samples.map(s => Uint8Array.from(atob(s.data), c => c.charCodeAt(0)));
const stops = data.stops.map(s => [1, 3, 5].map(i => parseInt(s.slice(i, i + 2), 16)));
function color(v) {
  const t = Math.min(Math.max(v, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(t), stops.length - 2);
  return stops[i].map((c, k) => Math.round(c + (t - i) * (stops[i + 1][k] - c)));
}
const table = Array.from({length: 256}, (_, q) => color((q - 1) / 254));
const share = q => q === 0 ? 0 : Math.pow(data.low, 1 - (q - 1) / 254);
const percent = v => v === 0 ? "less than " + 100 * data.low + " %" : (100 * v).toPrecision(2).replace(/e.*/, m => "·10" + m.slice(1)) + " %";
for (let i = 0; i < data.layers; i++) layer.add(new Option(i, i));
const group = data.heads / data.kv;
for (let i = 0; i < data.heads; i++) head.add(new Option(i + " (KV head " + Math.floor(i / group) + ")", i));
data.samples.forEach((s, i) => sample.add(new Option(s.name, i)));
layer.value = data.first[0];
head.value = data.first[1];
$("#map-low").textContent = "≤ " + 100 * data.low + " %";
const bar = $("#map-bar").getContext("2d");
for (let x = 0; x < 200; x++) { bar.fillStyle = "rgb(" + color(x / 199) + ")"; bar.fillRect(x, 0, 1, 10); }
let cell = null;
function at(r, c) {
  const s = data.samples[Number(sample.value)], n = s.size, per = n * (n + 1) / 2;
  return bytes[Number(sample.value)][(Number(layer.value) * data.heads + Number(head.value)) * per + r * (r + 1) / 2 + c];
}
function draw() {
  const s = data.samples[Number(sample.value)], n = s.size, k = Math.max(1, Math.floor(640 / n));
  canvas.width = canvas.height = n * k;
  const img = g.createImageData(n * k, n * k);
  for (let y = 0; y < n * k; y++) for (let x = 0; x < n * k; x++) {
    const r = Math.floor(y / k), c = Math.floor(x / k);
    if (c > r) continue;
    const p = table[at(r, c)], o = 4 * (y * n * k + x);
    img.data[o] = p[0]; img.data[o + 1] = p[1]; img.data[o + 2] = p[2]; img.data[o + 3] = 255;
  }
  g.putImageData(img, 0, 0);
  if (cell) {
    cell = [Math.min(cell[0], n - 1), Math.min(cell[1], n - 1)];
    g.strokeStyle = "#ff2d2d"; g.lineWidth = 2;
    g.strokeRect(cell[1] * k + 1, cell[0] * k + 1, k - 2, k - 2);
  }
  describe();
}
function describe() {
  const s = data.samples[Number(sample.value)], name = "Layer " + layer.value + ", query head " + head.value + " (KV head " + Math.floor(head.value / group) + ")";
  if (!cell) { text.textContent = name + ". Hover over the map, or use the arrow keys on it, for numbers."; return; }
  const [r, c] = cell, last = i => Math.min((i + 1) * s.tile, s.tokens) - 1;
  text.textContent = name + ". Queries " + r * s.tile + " to " + last(r) + ", keys " + c * s.tile + " to " + last(c) + ": " + (c > r ? "not yet written" : percent(share(at(r, c)))) + " of the attention.";
}
function pick(e) {
  const b = canvas.getBoundingClientRect(), n = data.samples[Number(sample.value)].size;
  const f = v => Math.min(n - 1, Math.max(0, Math.floor(v * n)));
  cell = [f((e.clientY - b.top) / b.height), f((e.clientX - b.left) / b.width)];
  draw();
}
button($(".controls"), "the attention map", "attention", name => {
  cell = null;
  draw();
  save(canvas, name + "-layer-" + layer.value + "-head-" + head.value);
});
canvas.addEventListener("pointermove", pick);
canvas.addEventListener("pointerdown", pick);
canvas.addEventListener("pointerleave", () => { cell = null; draw(); });
canvas.addEventListener("keydown", e => {
  const to = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]}[e.key];
  if (!to) return;
  e.preventDefault();
  const n = data.samples[Number(sample.value)].size;
  cell = cell ? [Math.min(n - 1, Math.max(0, cell[0] + to[0])), Math.min(n - 1, Math.max(0, cell[1] + to[1]))] : [0, 0];
  draw();
});
for (const e of [layer, head, sample]) e.addEventListener("change", draw);
document.addEventListener("click", e => {
  const m = e.target.closest && e.target.closest("svg.fig .m[data-layer]");
  if (!m || e.pointerType === "touch") return; // a tap is for the numbers
  layer.value = m.dataset.layer;
  head.value = Number(m.dataset.kv) * group;
  draw();
  $("#attention").scrollIntoView();
});
draw();
})();
