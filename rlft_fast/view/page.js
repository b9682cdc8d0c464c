"use strict";
// Texts of models and data reach the page through text nodes alone.
const read = (id) => { const block = document.getElementById(id); return block && JSON.parse(block.textContent); };
const at = (id) => document.getElementById(id);
const { panels, colors, phases, runs } = read("data");
for (const run of runs) run.series = new Map(Object.entries(run.series));  // an object has names of its own, such as constructor
const isPair = runs.length > 1;
const cache = new Map();
const cached = (key, make) => { if (!cache.has(key)) cache.set(key, make()); return cache.get(key); };

function node(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function shape(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Control characters and marks of direction are shown as escapes.
const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, (x) =>
  "\n\t\u200c\u200d".includes(x) ? x : "\\u" + x.codePointAt(0).toString(16).padStart(4, "0"));

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("-", "\u2212").replace("e-", "e\u2212");
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.max(4, Math.floor(Math.log10(size)) + 1) : 4 }).replace("-", "\u2212");
}

// ---- curves ----

const WIDTH = 360, HEIGHT = 185, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22, SMOOTHED_FROM = 20;

function ticks(low, high, count, isInteger) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].find((x) => x * power >= raw * 0.999) * power;
  if (isInteger) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0);
  return found;
}

function smooth(values) {
  const reach = Math.floor(values.length / SMOOTHED_FROM), sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const from = Math.max(i - reach, 0), to = Math.min(i + reach + 1, values.length);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function chart(name, title) {
  const own = runs.map((run, i) => ({ run: i, points: run.series.get(name) })).filter((x) => x.points && x.points[0].length);
  const steps = own.flatMap((x) => x.points[0]), values = own.flatMap((x) => x.points[1]);
  const [first, last] = steps.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  let [low, high] = values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  if (name === "accuracy") [low, high] = [Math.min(low, 0), Math.max(high, 1)];
  if (name === "tokens_per_second") low = 0;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const margin = (high - low) * 0.04;
  low -= name === "tokens_per_second" ? 0 : margin;
  high += margin;
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const tick of ticks(low, high, 4)) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(first, last, 5, true)) {
    svg.append(shape("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  for (const { run, points: [at, of] } of own) {
    const line = (ys, width, opacity) => shape("path", {
      class: `run${run}`, "stroke-width": width, "stroke-opacity": opacity,
      d: at.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join(""),
    });
    if (name === "accuracy" || at.length < SMOOTHED_FROM) {
      svg.append(line(of, 1.8, 1), ...at.map((step, i) => shape("circle", { class: `run${run}`, cx: x(step), cy: y(of[i]), r: 2.6 })));
    } else svg.append(line(of, 1, 0.3), line(smooth(of), 1.8, 1));
  }
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const shown = node("span", { className: "value" });
  const latest = () => shown.replaceChildren(own.map((x) => number(x.points[1].at(-1))).join(" / "));
  latest();
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), wanted = (event.clientX - box.left) / box.width * WIDTH;
    const step = steps.reduce((best, s) => Math.abs(x(s) - wanted) < Math.abs(x(best) - wanted) ? s : best);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(step));
    cursor.setAttribute("visibility", "visible");
    shown.replaceChildren(`step ${step}: ` + own.map((x) => number(x.points[1][x.points[0].indexOf(step)])).join(" / "));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); latest(); });
  return node("figure", {}, node("figcaption", {}, node("span", { title: visible(name) }, visible(title)), shown), svg);
}

function drawCurves() {
  const names = [...new Set(runs.flatMap((run) => [...run.series.keys()]))];
  const main = Object.keys(panels).filter((name) => names.includes(name));
  at("panels").append(...main.map((name) => chart(name, panels[name])));
  const others = names.filter((name) => !main.includes(name)).sort();
  const more = at("more");
  more.hidden = !others.length;
  more.querySelector("summary").append(`${others.length} more series`);
  more.addEventListener("toggle", () => {
    const place = more.querySelector(".panels");
    if (!place.children.length) place.append(...others.map((name) => chart(name, name)));
  });
  more.open = !main.length;
}

// ---- timeline ----

const WIDE = 1200, NAMES = 190, ROW = 20;

function timeline(run, index) {
  const { steps: [first, last], seconds, rows, left_out } = run.timeline, end = rows.length * ROW;
  const x = (time) => NAMES + time / (seconds || 1) * (WIDE - NAMES - RIGHT);
  const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${end + BOTTOM}`, role: "img", "aria-label": "timeline" });
  for (const tick of ticks(0, seconds, 8)) {
    svg.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: end }),
      shape("text", { x: x(tick), y: end + BOTTOM - 6, "text-anchor": "middle" }, `${number(tick)} s`));
  }
  rows.forEach((row, i) => {
    svg.append(shape("text", { x: 0, y: i * ROW + 14 }, `${visible(row.name)}, idle ${(100 * row.idle).toFixed(0)} %`));
    for (const [phase, from, to] of row.spans) {
      const bar = shape("rect", { x: x(from).toFixed(1), y: i * ROW + 3, width: Math.max(x(to) - x(from), 0.5).toFixed(1), height: ROW - 6, fill: phases[phase] });
      bar.append(shape("title", {}, `${phase}, ${number(to - from)} s`));
      svg.append(bar);
    }
  });
  const used = new Set(rows.flatMap((row) => row.spans.map(([phase]) => phase)));
  const legend = Object.keys(phases).filter((phase) => used.has(phase)).map((phase) => {
    const chip = node("i");
    chip.style.backgroundColor = phases[phase];
    return node("span", { className: "phase" }, chip, phase);
  });
  const more = left_out ? `; ${left_out} more workers are not shown` : "";
  const about = `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}; idle shares are of the whole run${more}`;
  const title = node("span", { className: isPair ? `name run${index}` : "" }, isPair ? `${visible(run.name)}: ${about}` : about);
  return node("figure", {}, node("figcaption", {}, title, node("span", { className: "value" }, ...legend)), svg);
}

function drawTimelines() {
  const own = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.timeline && run.timeline.rows.length);
  at("timeline").hidden = !own.length;
  at("timeline").append(...own.map(({ run, i }) => timeline(run, i)));
}

// ---- steps ----

const COLUMNS = ["reward_mean", "reward_std", "accuracy", "completion_length_mean", "truncated_share", "entropy", "approx_kl",
  "ref_kl", "clip_share", "grad_norm", "mismatch_mean", "tokens_per_second", "seconds"];

function drawSteps() {
  const columns = COLUMNS.filter((name) => runs.some((run) => run.series.has(name)));
  const rows = runs.flatMap((run, i) => {
    const table = new Map();
    columns.forEach((name, column) => (run.series.get(name) || [[], []])[0].forEach((step, k) => {
      if (!table.has(step)) table.set(step, { step, run: i, values: [] });
      table.get(step).values[column] = run.series.get(name)[1][k];
    }));
    return [...table.values()];
  }).sort((a, b) => b.step - a.step || a.run - b.run);
  const section = at("steps"), body = section.querySelector("tbody"), box = section.querySelector(".scroll");
  section.hidden = !rows.length;
  section.querySelector("thead").append(node("tr", {}, ...(isPair ? [node("th")] : []), node("th", {}, "step"),
    ...columns.map((name) => node("th", {}, name.replaceAll("_", " ")))));
  const grow = () => {
    for (const row of rows.splice(0, 100)) {
      const cells = [row.step.toLocaleString("en"), ...columns.map((_, column) => number(row.values[column]))];
      const line = node("tr", {}, ...cells.map((cell) => node("td", {}, cell)));
      if (isPair) line.prepend(node("td", { className: `name run${row.run}` }));
      if (steps.includes(row.step)) {
        line.className = "has";
        line.title = "show the samples of this step";
        line.addEventListener("click", () => { show({ step: row.step }); at("samples").scrollIntoView(); });
      }
      body.append(line);
    }
  };
  box.addEventListener("scroll", () => { if (box.scrollTop + box.clientHeight > box.scrollHeight - 200) grow(); });
  grow();
}

// ---- samples ----

const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
const state = { step: steps.at(-1), by: "text" };
const SAMPLES_AT_ONCE = 16;
let waiting = [], scale = null;

const samplesOf = (run, step) => cached(`samples-${run}-${step}`, () => read(`samples-${run}-${step}`) || []);

function tint(color, strength) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${Math.min(Math.max(strength, 0), 1) * 0.6})`;
}

function fact(name, value, className = "") {
  const short = name.slice(name.lastIndexOf(":") + 1).trim() || name;  // a part of a reward is named module:function
  return node("div", { className }, node("span", { title: name }, short), node("span", {}, value));
}

// ---- numbers of tokens ----

// For each overlay: its name, the scale of its colours, its meaning, and its values from the columns of a step.
const POLICY = "under the policy before the update", GENERATOR = "as the generator reported it";
const from = (name) => (column) => column(name) || [];
const difference = (column, more, less) => {
  const [a, b] = [column(more), column(less)];
  return a && b ? a.map((value, t) => value - b[t]) : [];
};
const OVERLAYS = {
  logprob: ["log-prob, policy", "low", `log-probability ${POLICY}`, from("logprob_T")],
  rollout_logprob: ["log-prob, generator", "low", `log-probability ${GENERATOR}`, from("rollout_logprob_T")],
  ratio: ["ratio", "ratio", `exp(log-probability ${POLICY} \u2212 log-probability ${GENERATOR})`,
    (column) => difference(column, "logprob_T", "rollout_logprob_T").map(Math.exp)],
  mismatch: ["mismatch", "signed", `log-probability ${GENERATOR} \u2212 log-probability ${POLICY}`,
    (column) => difference(column, "rollout_logprob_T", "logprob_T")],
  entropy: ["entropy", "high", `entropy of the next token ${POLICY}, in nats`, from("entropy_T")],
  advantage: ["advantage", "signed", "advantage, with the factors of corrections", from("advantage_T")],
  mask: ["mask", "mask", "whether the token was in the batch of the update", from("mask_T")],
  weight_version: ["weight version", "version", "version of the weights that sampled the token", from("weight_version_T")],
};
const TYPES = { mask_T: Uint8Array, rollout_logprob_T: Float32Array, logprob_T: Float32Array, entropy_T: Float32Array, advantage_T: Float32Array };

function decode(text, type) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new type(bytes.buffer);
}

// The columns of a step, decoded when they are asked for. null: the run has none of this step.
const tokensOf = (run, step) => cached(`tokens-${run}-${step}`, () => {
  const block = read(`tokens-${run}-${step}`);
  if (!block) return null;
  const column = (name) => cached(`tokens-${run}-${step}-${name}`, () => block[name] && decode(block[name], TYPES[name] || Int32Array));
  const spans = new Map(), lengths = column("length_B");
  let end = 0;
  column("sample_B").forEach((sample, i) => spans.set(sample, [end, end += lengths[i]]));
  const values = (by) => cached(`tokens-${run}-${step}-by-${by}`, () => OVERLAYS[by][3](column));
  return { spans, ids: column("token_id_T"), values, run };
});
function label(tokens, t, newline) {
  const text = cached(`texts-${tokens.run}`, () => read(`texts-${tokens.run}`))[tokens.ids[t]];
  return text === undefined ? `[${tokens.ids[t]}]` : visible(text).replaceAll("\n", newline);
}

// A ratio near 1 is shown by its distance from 1.
function ratio(value) {
  const distance = value - 1;
  return Math.abs(distance) < 5e-4 && distance !== 0 ? `1 ${distance < 0 ? "\u2212" : "+"} ${number(Math.abs(distance))}` : number(value);
}

// Colours of the step's values: the strongest colour is that of the 99th percentile of their sizes.
function scaleOf(by, step) {
  const kind = OVERLAYS[by][1], sizes = [], versions = new Set();
  runs.forEach((_, run) => {
    const values = tokensOf(run, step)?.values(by) || [], stride = Math.ceil(values.length / 20000);
    if (kind === "version") values.forEach((value) => versions.add(value));
    else for (let t = 0; t < values.length; t += stride) if (!Number.isNaN(values[t])) sizes.push(Math.abs(kind === "ratio" ? Math.log(values[t]) : values[t]));
  });
  sizes.sort((a, b) => a - b);
  const top = sizes[Math.floor((sizes.length - 1) * 0.99)] || 0, order = [...versions].sort((a, b) => a - b);
  const color = (value) => {
    if (value === undefined || Number.isNaN(value)) return "";
    if (kind === "version") return tint(colors[order.indexOf(value) % 6], 0.6);
    if (kind === "mask") return value ? tint(colors[2], 0.5) : "";
    const signed = kind === "ratio" ? Math.log(value) : kind === "low" ? -Math.abs(value) : value;
    return top ? tint(colors[signed < 0 ? 1 : 0], Math.abs(signed) / top) : "";
  };
  const legend = [];
  const swatch = (...shades) => {
    const box = node("i", { className: shades.length > 1 ? "" : "chip" });
    if (shades.length > 1) box.style.backgroundImage = `linear-gradient(90deg, ${shades.join(", ")})`;
    else box.style.backgroundColor = shades[0];
    return box;
  };
  const clear = tint(colors[0], 0);
  if (kind === "version") order.slice(0, 12).forEach((version) => legend.push(swatch(color(version)), number(version)));
  else if (kind === "mask") legend.push(swatch(color(1)), "learned from", node("span", { className: "unlearned" }, "not learned from"));
  else if (kind === "low") legend.push("0", swatch(clear, tint(colors[1], 1)), `\u2264 ${number(-top)}`);
  else if (kind === "high") legend.push("0", swatch(clear, tint(colors[0], 1)), `\u2265 ${number(top)}`);
  else {
    const [low, high] = kind === "ratio" ? [Math.exp(-top), Math.exp(top)] : [-top, top];
    const format = kind === "ratio" ? ratio : number;
    legend.push(`\u2264 ${format(low)}`, swatch(tint(colors[1], 1), clear, tint(colors[0], 1)), `\u2265 ${format(high)}`);
  }
  return { color, legend };
}

function drawTokens(text, tokens, [from, to]) {
  const values = tokens.values(state.by), mask = OVERLAYS[state.by][1] === "mask";
  for (let t = from; t < to; t++) {
    const piece = node("span", {}, label(tokens, t, "\u21b5\n"));
    const color = scale.color(values[t]);
    if (color) piece.style.backgroundColor = color;
    else if (mask) piece.className = "unlearned";
    piece.token = [tokens, t];
    text.append(piece);
  }
}

function showTip(event) {
  const tip = at("tip"), [tokens, t] = event.target.token || [];
  tip.hidden = !tokens;
  if (!tokens) return;
  const line = (name, value) => node("div", {}, node("span", {}, name), node("span", {}, value));
  const formats = { ratio, mask: (value) => value ? "learned from" : "not learned from" };
  tip.replaceChildren(line(`"${label(tokens, t, "\u21b5")}"`, `id ${tokens.ids[t]}`),
    ...Object.keys(OVERLAYS).map((by) => line(OVERLAYS[by][0], (formats[by] || number)(tokens.values(by)[t]))));
  const below = event.clientY + 18;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
}

// ---- groups ----

function drawTurn(turn) {
  const parts = turn.branch ? [node("span", { className: "branch", title: "the chat template has written the history anew" }, "branch")] : [];
  parts.push(node("span", { className: turn.sampled ? "said" : "given" }, visible(turn.text)));
  if (turn.reward !== undefined) parts.push(node("span", { className: "earned", title: "reward of the turn" }, number(turn.reward)));
  return parts;
}

function drawSample(run, sample, index, low, high) {
  const facts = node("div", { className: "facts" });
  const reward = fact("reward", number(sample.reward), "reward");
  if (sample.reward !== null && high > low) reward.style.backgroundColor = tint(colors[0], 0.5 * (sample.reward - low) / (high - low));
  facts.append(reward);
  const parts = Object.entries(sample.parts || {});
  if (parts.length > 1) facts.append(...parts.map(([name, value]) => fact(visible(name), number(value))));
  if (sample.environment) facts.append(fact("environment", visible(sample.environment)));
  if (sample.completion !== null) facts.append(fact(`end ${visible(sample.stop_reason || sample.finish_reason || "?")}`, `weights ${number(sample.weight_version)}`));
  const text = node("div", { className: "text" });
  if (sample.completion === null) text.append(node("span", { className: "unlearned" }, "damaged line"));
  else {
    const tokens = scale && tokensOf(run, state.step), span = tokens && tokens.spans.get(index);
    if (span) drawTokens(text, tokens, span);
    else if (sample.turns) text.append(...sample.turns.flatMap(drawTurn));
    else text.append(visible(sample.completion));
  }
  return node("div", { className: `sample run${run}` }, facts, text);
}

function drawImage(name) {
  const small = runs.map((_, run) => cached(`thumbnails-${run}`, () => read(`thumbnails-${run}`))).find((own) => Object.hasOwn(own, name));
  const image = small ? [node("img", { src: `data:image/jpeg;base64,${small[name]}`, alt: "" })] : [];
  return node("figure", {}, ...image, node("figcaption", {}, visible(name)));
}

// The samples of a prompt, those of two runs beside each other in two columns.
function drawGroup({ prompt, images, own }) {
  const grid = node("div", { className: "columns" });
  grid.style.gridTemplateColumns = `repeat(${runs.length}, minmax(0, 1fr))`;
  if (isPair) grid.append(...runs.map((run, i) => node("div", { className: `name run${i}` }, visible(run.name))));
  const ranges = own.map((samples) => samples.map((x) => x.sample.reward).filter((x) => x !== null))
    .map((rewards) => [Math.min(...rewards), Math.max(...rewards)]);
  const count = Math.max(...own.map((samples) => samples.length)), more = node("button");
  let drawn = 0;
  const grow = () => {
    for (const end = Math.min(count, drawn + SAMPLES_AT_ONCE); drawn < end; drawn++) {
      grid.append(...own.map((samples, run) => {
        const x = samples[drawn];
        return x ? drawSample(run, x.sample, x.index, ...ranges[run]) : node("div", { className: `sample run${run}` });
      }));
    }
    more.textContent = `${count - drawn} more samples`;
    more.hidden = drawn === count;
  };
  grow();
  more.addEventListener("click", grow);
  return node("div", { className: "group" }, node("div", { className: "prompt" }, ...images.map(drawImage), prompt === null ? "\u2013" : visible(prompt)), grid, more);
}

// Groups below the window are drawn when the reader comes near them.
function fill() {
  while (waiting.length && at("groups").getBoundingClientRect().bottom < innerHeight + 1500) {
    at("groups").append(drawGroup(waiting.shift()));
  }
}

function show(change) {
  Object.assign(state, change);
  const groups = new Map();
  let count = 0;
  runs.forEach((_, run) => samplesOf(run, state.step).forEach((sample, index) => {
    const { prompt, images = [] } = sample, key = JSON.stringify([prompt, images]);  // equal words may ask of other images
    if (!groups.has(key)) groups.set(key, { prompt, images, own: runs.map(() => []) });
    groups.get(key).own[run].push({ sample, index });
    count += 1;
  }));
  waiting = [...groups.values()];
  at("step").value = String(state.step);
  at("previous").disabled = state.step === steps[0];
  at("next").disabled = state.step === steps.at(-1);
  const hasTokens = runs.some((_, run) => at(`tokens-${run}-${state.step}`));
  scale = hasTokens && Object.hasOwn(OVERLAYS, state.by) ? scaleOf(state.by, state.step) : null;
  at("by").disabled = !hasTokens;
  at("by").value = scale ? state.by : "text";
  at("legend").replaceChildren(...(scale ? scale.legend : []));
  at("about").textContent = `${count.toLocaleString("en")} samples of ${groups.size.toLocaleString("en")} prompts`
    + (scale ? `. Colour: ${OVERLAYS[state.by][2]}.` : hasTokens ? "" : ". Numbers of tokens are written where log_tokens_mib is set.");
  at("groups").replaceChildren();
  fill();
}

function openSamples() {
  at("samples").hidden = !steps.length;
  if (!steps.length) return;
  at("step").append(...steps.map((step) => node("option", { value: String(step) }, step.toLocaleString("en"))));
  at("step").addEventListener("change", () => show({ step: Number(at("step").value) }));
  at("previous").addEventListener("click", () => show({ step: steps[steps.indexOf(state.step) - 1] }));
  at("next").addEventListener("click", () => show({ step: steps[steps.indexOf(state.step) + 1] }));
  at("by").append(node("option", { value: "text" }, "nothing"), ...Object.entries(OVERLAYS).map(([by, [label]]) => node("option", { value: by }, label)));
  at("by").addEventListener("change", () => show({ by: at("by").value }));
  at("groups").addEventListener("pointerover", showTip);
  at("groups").addEventListener("pointerleave", () => { at("tip").hidden = true; });
  for (const event of ["scroll", "resize"]) addEventListener(event, fill, { passive: true });
  // An address such as view.html#step=3&by=entropy opens a view.
  const wanted = new URLSearchParams(location.hash.slice(1)), step = Number(wanted.get("step"));
  show({ step: wanted.has("step") && steps.includes(step) ? step : state.step, by: wanted.get("by") || "text" });
}

// ---- the page ----

colors.forEach((color, i) => document.documentElement.style.setProperty(`--color${i}`, color));
document.title = runs.map((run) => visible(run.name)).join(" and ");
at("title").append(...runs.map((run, i) => node("span", { className: isPair ? `name run${i}` : "" }, visible(run.name))));
at("notes").append(...runs.flatMap((run) => run.notes.map((note) => node("li", {}, (isPair ? `${visible(run.name)}: ` : "") + visible(note)))));
drawCurves();
drawTimelines();
drawSteps();
openSamples();
at("groups").getBoundingClientRect();  // the layout is done by then
document.documentElement.dataset.readyMs = performance.now().toFixed(0);
