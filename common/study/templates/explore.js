"use strict";
// The page's own script: filters the rows of the data block, draws them, answers questions. Text is only ever
// set as text. An item is a run, or the mean of the complete runs of a cell: both have cell, minutes, quality. A
// cell is measured, or published, or one prediction, which is in no answer and on no front.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PALETTE = DATA.palette;
const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "plus", "inverted"];
const KINDS = { published: "published, not measured here", predicted: "predicted, not measured" };
const KIND_SHAPES = { published: "hexagon", predicted: "star" }; // of no category
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4]];
const FIELDS = ["clock", "q", "model", "size", "ends", "scale", "from", "to", "baseline", "quality", "minutes", "dollars", "x", "show",
  "colour", "sortBy", "cloud"];
const DEFAULTS = { clock: "run", x: "time", show: "means", colour: "recipe", sortBy: "timeSameQuality" }; // and below
const ROW_PX = 32, NUM_ROWS = 36, MAX_DASHED = 200, MAX_LEGEND = 30, MAX_BANDS = 20, MAX_BENCH_ROWS = 400;

const $ = (id) => document.getElementById(id);
const form = $("filters"), field = (name) => form.elements.namedItem(name);
const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => (isNaN(a) || isNaN(b) ? collator.compare(a, b) : a - b);

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value; else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// ---- the rows ----

const cells = DATA.cells.map((cell, id) => ({
  ...cell, id, methodSet: new Set(cell.methods), key: `${cell.benchmark} ${cell.size}`,
  lines: cell.settings.map((line) => DATA.lines[line]),
}));
for (const cell of cells) {
  const budget = cell.budget === null || cell.budget === 1 || cell.name.includes(cell.budget) ? "" : `, budget ${cell.budget}`;
  const isNamed = cell.name.includes(cell.configuration) || cell.kind !== "measured", isTurned = /^with(out)?-/.test(cell.name);
  const what = isNamed ? cell.name : isTurned ? cell.configuration : `${cell.configuration}: ${cell.name}`;
  cell.title = `${cell.study && cell.study + (cell.kind === "measured" ? "/" : ": ")}${what} on ${cell.hardware}${budget}`;
  cell.model = `${cell.benchmark} ${cell.size}${cell.proxy ? " (proxy)" : ""}`;
  cell.task = cell.model + (cell.target === null ? "" : ` to ${cell.target}`); // as in a score, another target is another task
  const names = cell.methods.map((method) => DATA.methods[method]);
  cell.methodNames = names.join(", ");
  cell.text = [cell.folder, cell.title, cell.model, cell.methodNames, ...cell.lines].join("\n").toLowerCase();
}
const columns = DATA.runs;
const runs = columns.cell.map((cell, id) => {
  const run = { id, cell: cells[cell], isRun: true };
  for (const name in columns) if (name !== "cell") run[name] = columns[name][id];
  run.whole = run.minutes;
  run.points = run.curve;
  run.text = `${run.file} seed ${run.seed} ${run.commit}`.toLowerCase();
  return run;
});
const unique = (values) => [...new Set(values)].sort(compare);
let clock = "";

function setClock() {
  if (clock === state.clock) return;
  clock = state.clock;
  const isTraining = clock === "training";
  for (const run of runs) {
    run.minutes = !isTraining || run.whole === null ? run.whole : run.evaluation === null ? null : Math.max(0, run.whole - run.evaluation);
    const hasEnded = run.status <= 1 || run.cell.kind === "predicted"; // reached its target or its end
    run.complete = hasEnded && run.minutes > 0 && run.quality !== null;
    run.minutesRange = run.minutes === null ? null : run.cell.range?.map((minutes) => Math.max(0, minutes - run.whole + run.minutes));
    run.curve = [];
    for (let i = 0; i < run.points.length; i += 4) {
      run.curve.push(run.points[i] - (isTraining ? run.points[i + 1] : 0), run.points[i + 2], run.points[i + 3]);
    }
  }
  allMeans = meansOf(runs);
  for (const item of allMeans) item.cell.numComplete = item.n;
}

const most = (values) => {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || collator.compare(a[0], b[0]))[0]?.[0] || "";
};
const isMeasured = (run) => run.cell.kind === "measured", numMeasured = runs.filter(isMeasured).length;
let typical = runs.filter(isMeasured); // qualities of two benchmarks do not compare; without runs all is shown
DEFAULTS.model = most(typical.map((run) => run.cell.benchmark));
typical = typical.filter((run) => run.cell.benchmark === DEFAULTS.model);
DEFAULTS.size = most(typical.map((run) => run.cell.size));
// Nor does the time to a target with that to the end of a budget.
DEFAULTS.ends = !numMeasured || typical.some((run) => run.cell.size === DEFAULTS.size && !run.cell.trains_on) ? "target" : "budget";
const FACETS = {
  recipe: { of: (run) => run.cell.configuration },
  hardware: { of: (run) => run.cell.hardware },
  study: { of: (run) => run.cell.study || "scored runs" },
  status: { of: (run) => DATA.statuses[run.status] },
  audit: { of: (run) => (!isMeasured(run) ? "not audited" : run.errors ? "errors" : run.warnings ? "warnings only" : "no finding") },
};
for (const facet of Object.values(FACETS)) facet.values = unique(runs.map(facet.of));
const isPlain = (recipe) => !/.[+-]|^[A-Z]/.test(recipe); // not that of an ablation, nor published
const plainFirst = (recipes) => recipes.sort((a, b) => isPlain(b) - isPlain(a));
plainFirst(FACETS.recipe.values);
runs.forEach((run) => { run.facets = Object.values(FACETS).map((facet) => facet.of(run)); });

// ---- what is chosen: in the form, and in the address ----

const state = { algorithms: new Map(), prices: new Map() };

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of FIELDS) state[name] = said.get(name) || DEFAULTS[name] || "";
  for (const name of ["model", "size", "ends", "cloud"]) if (state[name] === "all") state[name] = "";
  for (const name in FACETS) state[name] = new Set(said.getAll(name).filter((value) => value !== "all"));
  state.spot = said.get("spot") === "1";
  state.algorithms.clear();
  for (const name of said.getAll("algorithms").join().split(",")) {
    const method = DATA.methods.indexOf(name.replace(/^[ +-]/, ""));
    if (method >= 0) state.algorithms.set(method, !name.startsWith("-"));
  }
  state.prices.clear();
  for (const price of said.getAll("price")) {
    const end = price.lastIndexOf(":"), dollars = Number(price.slice(end + 1));
    if (dollars > 0) state.prices.set(price.slice(0, end), dollars);
  }
}

function address() {
  const said = new URLSearchParams();
  for (const name of FIELDS) if (state[name] !== (DEFAULTS[name] || "")) said.set(name, state[name] || "all");
  for (const name in FACETS) for (const value of state[name]) said.append(name, value);
  if (state.algorithms.size) {
    said.set("algorithms", [...state.algorithms].map(([method, has]) => (has ? "" : "-") + DATA.methods[method]).join(","));
  }
  if (state.spot) said.set("spot", "1");
  for (const [name, dollars] of state.prices) said.append("price", `${name}:${dollars}`);
  return "#" + said;
}

function fillForm() {
  for (const name of FIELDS) if (field(name)) field(name).value = state[name];
  for (const name in FACETS) for (const box of facetBoxes[name].values()) box.input.checked = state[name].has(box.input.value);
  methodBoxes.forEach((box, method) => { box.select.value = state.algorithms.has(method) ? (state.algorithms.get(method) ? "has" : "not") : ""; });
  field("spot").checked = state.spot;
  for (const name of ["model", "size", "ends", "scale", "cloud", "sortBy", "x", "show", "colour", "clock"]) {
    if (field(name).selectedIndex < 0) { field(name).value = DEFAULTS[name] || ""; state[name] = field(name).value; }
  }
}

function readForm() {
  for (const name of FIELDS) if (field(name)) state[name] = field(name).value;
  for (const name in FACETS) state[name] = new Set([...facetBoxes[name].values()].filter((box) => box.input.checked).map((box) => box.input.value));
  state.algorithms = new Map();
  methodBoxes.forEach((box, method) => { if (box.select.value) state.algorithms.set(method, box.select.value === "has"); });
  state.spot = field("spot").checked;
}

// ---- what it comes to ----

let visible = [], numElsewhere = 0, means = [], items = [], reference = null;

function filter() {
  // A bit for each filter that a run fails: a value of a facet counts the runs that fail no other filter.
  const facets = Object.keys(FACETS), terms = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const counts = facets.map(() => new Map()), methodCounts = new Int32Array(DATA.methods.length);
  const [low, high] = [state.from === "" ? -Infinity : Number(state.from), state.to === "" ? Infinity : Number(state.to)];
  const isBounded = state.from !== "" || state.to !== "";
  for (const cell of cells) {
    cell.passes = (!state.model || cell.benchmark === state.model) && (!state.size || cell.size === state.size)
      && (!isBounded || (cell.budget !== null && cell.budget >= low && cell.budget <= high))
      && [...state.algorithms].every(([method, has]) => cell.methodSet.has(method) === has);
    cell.isElsewhere = state.ends !== "" && cell.trains_on !== (state.ends === "budget"); // on another axis
    cell.missing = cell.passes ? terms.filter((term) => !cell.text.includes(term)) : terms;
  }
  const ofModel = runs.filter(({ cell }) => (!state.model || cell.benchmark === state.model) && (!state.size || cell.size === state.size));
  visible = [];
  numElsewhere = 0;
  for (const run of runs) {
    if (!run.cell.passes || run.cell.missing.some((term) => !run.text.includes(term))) continue;
    let failed = 0;
    for (let i = 0; i < facets.length; i++) {
      const chosen = state[facets[i]];
      if (chosen.size && !chosen.has(run.facets[i])) failed |= 1 << i;
    }
    if (run.cell.isElsewhere) { numElsewhere += !failed && isMeasured(run); continue; }
    for (let i = 0; i < facets.length; i++) {
      if ((failed & ~(1 << i)) === 0) counts[i].set(run.facets[i], (counts[i].get(run.facets[i]) || 0) + 1);
    }
    if (failed) continue;
    visible.push(run);
    for (const method of run.cell.methods) methodCounts[method]++;
  }
  facets.forEach((name, i) => {
    const known = new Set(ofModel.map((run) => run.facets[i]));
    for (const [value, box] of facetBoxes[name]) {
      box.count.textContent = counts[i].get(value) || 0;
      box.input.parentNode.hidden = !known.has(value) && !state[name].has(value);
    }
  });
  methodBoxes.forEach((box, method) => { box.count.textContent = methodCounts[method]; });
}

function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }

function interval(values, step = 0) { // of values that are multiples of a step: intervals.rounding_squares
  const n = values.length;
  if (n < 2) return null;
  const middle = mean(values), spread = Math.sqrt((values.reduce((sum, v) => sum + (v - middle) ** 2, 0) + n * step ** 2 / 6) / (n - 1));
  const half = DATA.t[Math.min(n - 2, DATA.t.length - 1)] * spread / Math.sqrt(n);
  return [middle - half, middle + half];
}

function meanOf(cell, ofCell) {
  const complete = ofCell.filter((run) => run.complete), minutes = complete.map((run) => run.minutes);
  const all = (name) => { const known = complete.map((run) => run[name]).filter((v) => v !== null); return known.length ? mean(known) : null; };
  const ofLogs = (values) => { const range = values.every((v) => v > 0) && interval(values.map(Math.log)); return range && range.map(Math.exp); };
  const length = complete.length ? Math.min(...complete.map((run) => run.curve.length)) : 0;
  const curve = [];
  for (let i = 0; i < length; i++) curve.push(complete.some((run) => run.curve[i] === null) ? null : mean(complete.map((run) => run.curve[i])));
  const ends = [all("minutes"), all("samples"), all("quality")];
  if (length && complete.some((run) => run.curve.length > length)) curve.push(...ends); // others went on where the first stopped
  return {
    cell, n: complete.length, num: ofCell.length, curve, runs: ofCell, complete: complete.length > 0,
    minutes: ends[0], quality: ends[2], samples: ends[1], samples_per_s: all("samples_per_s"),
    minutesRange: cell.range ? ofCell[0].minutesRange : ofLogs(minutes), samplesRange: ofLogs(complete.map((run) => run.samples)), qualityRange: interval(complete.map((run) => run.quality), cell.quality_step)?.map((value) => Math.min(Math.max(value, 0), 1)),
    errors: ofCell.reduce((sum, run) => sum + run.errors, 0), warnings: ofCell.reduce((sum, run) => sum + run.warnings, 0),
  };
}

function meansOf(of) {
  return [...grouped(of, (run) => run.cell)].map(([cell, ofCell]) => meanOf(cell, ofCell));
}
let allMeans = [];

function rate(hardware) {
  if (state.prices.has(hardware)) return state.prices.get(hardware);
  if (!state.cloud) return null;
  const row = DATA.prices.findLast((price) => price.cloud === state.cloud && hardware in price.fits);
  if (!row) return null;
  const [onDemand, spot] = row.fits[hardware];
  return state.spot && spot !== null ? spot : onDemand;
}

function cost(item) {
  const dollars = rates.get(item.cell.hardware);
  return dollars === null || item.minutes === null ? null : item.minutes / 60 * dollars;
}
let rates = new Map();

function xOf(item) { return state.x === "cost" ? cost(item) : state.x === "samples" ? item.samples : item.minutes; }

function chooseReference() {
  const known = new Map(visible.map((run) => [run.cell.task, 0]));
  const ofModel = allMeans.filter((item) => item.complete && item.cell.kind !== "predicted" && !item.cell.isElsewhere && known.has(item.cell.task));
  const named = ofModel.find((item) => item.cell.folder === state.baseline);
  const rank = (item) => [item.cell.kind === "measured", item.cell.configuration === DATA.reference, !item.cell.study, item.cell.budget === 1 || item.cell.budget === null, item.n];
  reference = named || ofModel.reduce((best, item) => {
    if (!best) return item;
    const [a, b] = [rank(item), rank(best)];
    const i = a.findIndex((value, k) => value !== b[k]);
    return i >= 0 && a[i] > b[i] ? item : best;
  }, null);
  const keys = [state.ends, state.clock, ...known.keys()].join();
  if (field("baseline").dataset.keys !== keys) {
    const sorted = [...ofModel].sort((a, b) => collator.compare(a.cell.task + a.cell.title, b.cell.task + b.cell.title));
    field("baseline").replaceChildren(...sorted.map((item) => el("option", { value: item.cell.folder }, `${item.cell.title}: ${item.cell.task}`)));
    field("baseline").dataset.keys = keys;
  }
  field("baseline").value = reference ? reference.cell.folder : "";
}

// ---- numbers as text ----

const number = (value, digits = 4) => value.toLocaleString("en", { maximumSignificantDigits: digits });
const quality = (value) => value.toFixed(4);
const dollars = (value) => (value >= 0.01 || value === 0 ? `$${value.toFixed(value < 1 ? 3 : 2)}` : `$${value.toPrecision(2)}`);
const ratio = (value) => `${value.toFixed(2)}x`;
function time(minutes) {
  if (minutes < 5) return `${(minutes * 60).toFixed(1)} s`;
  return minutes < 600 ? `${minutes.toFixed(2)} min` : `${(minutes / 60).toFixed(2)} h`;
}
const isPrediction = (item) => item.cell.kind === "predicted";
const runsText = (item) => (item.n === 1 ? "1 run" : `${item.n} runs`);
const between = (range, text) => (range ? ` (${text(range[0])} to ${text(range[1])})` : "");

// ---- questions and their answers ----

// Runs that stop at their target have the same quality: the target, whatever they overshot it by.
function sameQuality() {
  const { target } = reference.cell, stopped = !reference.cell.trains_on && hasNoMiss(reference);
  return stopped && target !== null && target <= reference.quality ? target : reference.quality;
}

function limits() {
  const said = (name, other) => (state[name] === "" ? other : Number(state[name]));
  const paid = reference && cost(reference);
  return { quality: said("quality", sameQuality()), minutes: said("minutes", reference.minutes), dollars: said("dollars", paid) };
}

function least(pool, value, most = false) {
  return pool.reduce((best, item) => (best === null || (most ? value(item) > value(best) : value(item) < value(best)) ? item : best), null);
}

function answer(question, found, bold, rest) { return el("li", {}, `${question}: `, found ? el("strong", {}, bold) : bold, rest); }

// The bounds of all recipes hold together: the best mean of many is that of a lucky one (common/study/ranking.py).
// They are of all complete runs of a recipe, so they say nothing of a mean of some of them.
const isWhole = (item) => (item.isRun ? item.cell.numShown : item.n) === item.cell.numComplete;
// A run that missed the target took no time to it.
const hasNoMiss = (item) => item.cell.trains_on || (item.runs || [item]).every((run) => run.status !== 1);
const boundOf = (item, name, side) => (isWhole(item) ? item.cell.bounds[name]?.[side] ?? null : null);
const timeBound = (item, side) => boundOf(item, clock, side);
const qualityBound = (item, side) => boundOf(item, "quality", side);

function noRecipe(able, does) {
  return able.length ? `no recipe shown here ${does} in two runs${able.every(isWhole) ? "" : " and with all its runs"}.` : `no recipe shown here ${does}.`;
}

function limitsText(interval, text, bound) {
  const own = interval ? `95 % by their own spread: ${text(interval[0])} to ${text(interval[1])}; ` : "";
  return ` (${own}${bound} by the spread of all recipes, which holds for all of them at once)`;
}

function whatIsShown(found, bound) {
  if (bound(reference, 0) === null) return ` ${reference.cell.title} has a single run: no bounds.`;
  const isApart = bound(found, 1) < bound(reference, 0) || bound(reference, 1) < bound(found, 0);
  return isApart ? " Their bounds are apart: the difference is shown." : " Their bounds overlap: no difference is shown.";
}

function atSameQuality(question, better, pool, value, text, range, limit) {
  const bound = (item, side) => { const minutes = timeBound(item, side); return minutes === null ? null : value(item) * minutes / item.minutes; };
  const able = pool.filter((item) => item.quality >= limit && hasNoMiss(item)), found = least(able.filter((item) => timeBound(item, 1) !== null), (item) => bound(item, 1));
  if (!found) return answer(`${question} (${quality(limit)} or more)`, null, noRecipe(able, "has it"), "");
  const same = found.cell === reference.cell, base = value(reference);
  const against = same ? " None is shown to be better." : ` ${reference.cell.title} takes ${text(base)} for ${quality(reference.quality)}: ${ratio(base / value(found))} ${better}.${whatIsShown(found, bound)}`;
  const spread = limitsText(range && found.minutesRange, range, `at most ${text(bound(found, 1))}`);
  return answer(`${question} (${quality(limit)} or more)`, found, found.cell.title, `: ${text(value(found))} for ${quality(found.quality)}, ${runsText(found)}${spread}.${against}`);
}

function atSameCost(question, pool, value, text, limit) {
  const able = pool.filter((item) => value(item) <= limit), found = least(able.filter((item) => qualityBound(item, 0) !== null), (item) => qualityBound(item, 0), true);
  if (!found) return answer(`${question} (at most ${text(limit)})`, null, noRecipe(able, "does it"), "");
  const same = found.cell === reference.cell, gain = (found.quality - reference.quality) * 100;
  const against = same ? " None is shown to be better." : ` ${reference.cell.title} has ${quality(reference.quality)}: ${gain >= 0 ? "+" : ""}${gain.toFixed(2)} points.${whatIsShown(found, qualityBound)}`;
  const spread = limitsText(found.qualityRange, quality, `at least ${quality(qualityBound(found, 0))}`);
  return answer(`${question} (at most ${text(limit)})`, found, found.cell.title, `: ${quality(found.quality)} for ${text(value(found))}, ${runsText(found)}${spread}.${against}`);
}

function drawAnswers() {
  const list = $("answers");
  $("proxy").hidden = !reference || !reference.cell.proxy;
  if (!reference) { list.replaceChildren(el("li", {}, "No complete run is shown.")); return; }
  const pool = means.filter((item) => item.complete && item.cell.kind !== "predicted" && item.cell.task === reference.cell.task);
  if (!pool.some((item) => item.cell === reference.cell)) pool.push(reference);
  const minutes = (item) => item.minutes, limit = limits();
  const answers = [
    atSameQuality("Fastest at the same quality", "as fast", pool, minutes, time, time, limit.quality),
    atSameCost("Best in the same time", pool, minutes, time, limit.minutes),
  ];
  const priced = pool.filter((item) => cost(item) !== null);
  if (cost(reference) === null) {
    answers.push(answer("Cheapest at the same quality, best at the same cost", null, `no $/h is known for ${reference.cell.hardware}; choose one under Prices.`, ""));
  } else {
    answers.push(atSameQuality("Cheapest at the same quality", "as cheap", priced, cost, dollars, null, limit.quality));
    answers.push(atSameCost("Best at the same cost", priced, cost, dollars, limit.dollars));
    const unpriced = new Set(pool.filter((item) => cost(item) === null).map((item) => item.cell.hardware));
    if (unpriced.size) answers.push(answer("Not compared by cost", null, `no $/h is known for ${[...unpriced].join(", ")}.`, ""));
  }
  const keys = new Set(means.map((item) => item.cell.task));
  if (keys.size > 1) answers.push(answer("Compared here", null, `${reference.cell.task} only, of ${[...keys].join(", ")}.`, ""));
  list.replaceChildren(...answers);
}

// ---- colours and shapes ----

let categories = new Map();
const categoryOf = (item) => item.cell.category;

function categorise() {
  if (categories.by === state.colour) return;
  const of = { recipe: (c) => c.configuration, name: (c) => c.name, hardware: (c) => c.hardware,
    study: (c) => c.study || "scored runs", budget: (c) => (c.budget === null ? "unknown" : `${c.budget}`) }[state.colour];
  const isRecipe = state.colour === "recipe";
  const first = isRecipe ? DATA.coloured_first : []; // as in the report
  const rest = unique(cells.map(of)).filter((name) => !first.includes(name));
  const names = [...first, ...(isRecipe ? plainFirst(rest) : rest)];
  categories = new Map(names.map((name, i) => [name, {
    name, colour: PALETTE[i % PALETTE.length], shape: SHAPES[i % SHAPES.length], dash: DASHES[i % DASHES.length],
  }]));
  categories.by = state.colour;
  for (const cell of cells) cell.category = categories.get(of(cell));
}

function corner(count, outer, inner) {
  return Array.from({ length: count }, (_, i) => {
    const [r, angle] = [i % 2 ? inner : outer, (2 * Math.PI * i) / count];
    return [r * Math.sin(angle), -r * Math.cos(angle)];
  });
}

function mark(context, shape, x, y, r) {
  if (shape === "circle") { context.moveTo(x + r, y); context.arc(x, y, r, 0, 7); return; }
  if (shape === "cross" || shape === "plus") {
    const [a, b] = shape === "plus" ? [r, 0] : [r * 0.8, r * 0.8];
    context.moveTo(x - a, y - b); context.lineTo(x + a, y + b);
    context.moveTo(x + b, y - a); context.lineTo(x - b, y + a);
    return;
  }
  const corners = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]], triangle: [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]],
    inverted: [[0, 1.2], [1.1, -0.9], [-1.1, -0.9]], diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    hexagon: corner(6, 1.2, 1.2), star: corner(10, 1.5, 0.6),
  }[shape];
  corners.forEach(([dx, dy], i) => (i ? context.lineTo(x + dx * r, y + dy * r) : context.moveTo(x + dx * r, y + dy * r)));
  context.closePath();
}

function drawMarks(context, category, points, radius, alpha, kind) {
  // One mark is drawn, then copied: a path of thousands of marks is slow to fill.
  const scale = 2 * (window.devicePixelRatio || 1), half = Math.ceil(radius * 1.6) + 2, shape = KIND_SHAPES[kind] || category.shape;
  const stamp = el("canvas", { width: 2 * half * scale, height: 2 * half * scale }), pen = stamp.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = pen.strokeStyle = category.colour;
  pen.lineWidth = 1.6;
  pen.beginPath();
  mark(pen, shape, half, half, radius);
  if (shape in { cross: 1, plus: 1, hexagon: 1, star: 1 }) pen.stroke(); else pen.fill();
  context.globalAlpha = alpha;
  for (const [x, y] of points) context.drawImage(stamp, x - half, y - half, 2 * half, 2 * half);
  context.globalAlpha = 1;
}

function drawLegend() {
  const shown = [...new Set(items.filter((item) => item.quality !== null).map(categoryOf))].sort((a, b) => compare(a.name, b.name));
  const kinds = [...new Set(items.map((item) => item.cell.kind))].filter((kind) => kind in KINDS);
  const keys = [...shown.slice(0, MAX_LEGEND), ...kinds.map((kind) => ({ kind, name: KINDS[kind], colour: getComputedStyle(document.body).color, dash: [0, 99] }))];
  const entries = keys.map((category) => {
    const key = el("canvas", { width: 68, height: 28, "aria-hidden": "true" }), context = key.getContext("2d");
    context.scale(2, 2);
    context.strokeStyle = category.colour;
    context.lineWidth = 1.6;
    context.setLineDash(category.dash);
    context.beginPath(); context.moveTo(1, 7); context.lineTo(33, 7); context.stroke();
    drawMarks(context, category, [[17, 7]], 4, 1, category.kind);
    return el("li", {}, key, category.name);
  });
  if (shown.length > MAX_LEGEND) entries.splice(MAX_LEGEND, 0, el("li", {}, `and ${shown.length - MAX_LEGEND} more`));
  $("legend").replaceChildren(...entries);
}

// ---- charts ----

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step || 0); // not -0
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function logTicks(low, high, count) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const factor of [1, 2, 5]) if (factor * power >= low && factor * power <= high) found.push(factor * power);
  }
  return found.length > 2 * count ? found.filter((value) => `${value.toExponential()}`.startsWith("1e")) : found;
}

function qualityName() {
  const models = unique(items.map((item) => item.cell.benchmark));
  if (models.length > 1) return "qualities of several models: they do not compare";
  return DATA.qualities[models[0]] || "quality";
}

class Chart {
  // Two canvases, so that what is pointed at is drawn without the rest; points are found by their pixels.
  constructor(host) {
    this.host = $(host);
    this.base = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { tabIndex: 0, role: "img" });
    this.tip = el("div", { className: "tip", role: "status", hidden: true });
    this.host.append(this.base, this.over, this.tip);
    this.clear();
    this.over.addEventListener("pointermove", (event) => this.show(this.nearest(event.offsetX, event.offsetY)));
    this.over.addEventListener("pointerleave", () => this.show(-1));
    this.over.addEventListener("click", (event) => this.open(this.nearest(event.offsetX, event.offsetY)));
    this.over.addEventListener("blur", () => this.show(-1));
    this.over.addEventListener("keydown", (event) => this.key(event));
  }

  clear() { this.xs = []; this.ys = []; this.of = []; this.values = []; this.at = -1; this.order = null; }

  start(low, high, least, right, label, pad) {
    // From the lowest to the highest quality, from 0, or on a logarithmic axis from the least x, to the right.
    const { clientWidth: width, clientHeight: height } = this.host, scale = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) { canvas.width = width * scale; canvas.height = height * scale; }
    this.clear();
    const context = this.base.getContext("2d"), style = getComputedStyle(document.body);
    context.scale(scale, scale);
    this.over.getContext("2d").scale(scale, scale);
    this.ink = style.color;
    const isLog = state.scale !== "" && least > 0 && right > least, isLogError = state.scale === "xy" && high < 1;
    const ofX = isLog ? Math.log10 : (value) => value, ofY = isLogError ? (value) => -Math.log10(Math.max(1 - value, 1e-9)) : (value) => value;
    if (!(high > low)) { low -= Math.abs(low) * 0.05 || 0.05; high += isLogError ? (1 - high) / 2 : Math.abs(high) * 0.05 || 0.05; }
    if (!(right > 0)) right = 1;
    let [left, end] = isLog ? [ofX(least), ofX(right)] : [0, right], [bottom, top] = [ofY(low), ofY(high)];
    const [across, up] = [(end - left) * pad, (top - bottom) * 1.6 * pad];
    [left, end, bottom, top] = [left - isLog * across, end + across, bottom - up, top + up];
    const box = { left: 66, top: 10, right: width - 12, bottom: height - 40 };
    this.x = (value) => box.left + (ofX(value) - left) / (end - left) * (box.right - box.left);
    this.y = (value) => box.bottom - (ofY(value) - bottom) / (top - bottom) * (box.bottom - box.top);
    this.box = box; this.width = width; this.height = height;
    context.font = `12px ${style.fontFamily}`;
    context.fillStyle = context.strokeStyle = this.ink;
    context.lineWidth = 1;
    const numX = Math.max(2, width / 110), numY = Math.max(2, height / 55);
    const powers = isLog ? logTicks(10 ** left, 10 ** end, numX) : [], errors = isLogError ? logTicks(10 ** -top, 10 ** -bottom, numY) : [];
    const linear = ticks(isLog ? 10 ** left : left, isLog ? 10 ** end : end, numX);
    const upwards = ticks(isLogError ? 1 - 10 ** -bottom : bottom, isLogError ? 1 - 10 ** -top : top, numY);
    context.textAlign = "center"; context.textBaseline = "top";
    const atX = powers.length > 1 ? powers.map((value) => [value, number(value, 3)])
      : linear.found.map((value) => [value, value.toLocaleString("en", { minimumFractionDigits: linear.digits, maximumFractionDigits: linear.digits })]);
    for (const [value, label_] of atX) context.fillText(label_, this.x(value), box.bottom + 6);
    context.fillText(label, (box.left + box.right) / 2, box.bottom + 22);
    context.textAlign = "right"; context.textBaseline = "middle";
    const atY = errors.length > 1 ? errors.map((error) => [1 - error, (1 - error).toFixed(Math.max(1, -Math.floor(Math.log10(error) + 1e-9)))])
      : upwards.found.map((value) => [value, value.toFixed(upwards.digits)]);
    for (const [value, label_] of atY) {
      context.fillText(label_, box.left - 6, this.y(value));
      context.globalAlpha = 0.15;
      context.beginPath(); context.moveTo(box.left, this.y(value)); context.lineTo(box.right, this.y(value)); context.stroke();
      context.globalAlpha = 1;
    }
    context.save(); context.translate(9, (box.top + box.bottom) / 2); context.rotate(-Math.PI / 2);
    context.textAlign = "center"; context.fillText(qualityName(), 0, 0); context.restore();
    context.beginPath(); context.moveTo(box.left, box.top); context.lineTo(box.left, box.bottom); context.lineTo(box.right, box.bottom); context.stroke();
    return context;
  }

  empty(text) {
    const context = this.start(0, 1, 0, 1, "", 0);
    context.clearRect(0, 0, this.width, this.height);
    context.textAlign = "center"; context.textBaseline = "middle";
    context.fillText(text, this.width / 2, this.height / 2);
    this.over.setAttribute("aria-label", text);
  }

  add(item, x, y, values) { this.xs.push(x); this.ys.push(y); this.of.push(item); this.values.push(values); }

  nearest(x, y) {
    let best = -1, distance = 24 * 24;
    for (let i = 0; i < this.xs.length; i++) {
      const [dx, dy] = [this.xs[i] - x, this.ys[i] - y], d = dx * dx + dy * dy;
      if (d < distance) { distance = d; best = i; }
    }
    return best;
  }

  show(i) {
    if (i === this.at) return;
    this.at = i;
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    this.tip.hidden = i < 0;
    if (i < 0) return;
    const item = this.of[i], category = categoryOf(item);
    const own = this.of.flatMap((other, k) => (other === item ? [k] : []));
    context.lineWidth = 2.5; context.strokeStyle = category.colour;
    context.beginPath();
    own.forEach((k, n) => (n ? context.lineTo(this.xs[k], this.ys[k]) : context.moveTo(this.xs[k], this.ys[k])));
    context.stroke();
    context.strokeStyle = this.ink; context.lineWidth = 1.5;
    context.beginPath(); context.arc(this.xs[i], this.ys[i], 7, 0, 7); context.stroke();
    this.tip.textContent = described(item, this.values[i]);
    const right = this.xs[i] > this.width / 2;
    this.tip.style.left = right ? "" : `${this.xs[i] + 12}px`;
    this.tip.style.right = right ? `${this.width - this.xs[i] + 12}px` : "";
    const below = this.ys[i] < this.height / 2;
    this.tip.style.top = below ? `${this.ys[i] + 8}px` : "";
    this.tip.style.bottom = below ? "" : `${this.height - this.ys[i] + 8}px`;
  }

  key(event) {
    if (event.key === "Escape") { this.show(-1); return; }
    if (event.key === "Enter") { this.open(this.at); return; }
    if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !this.xs.length) return;
    event.preventDefault();
    this.order ??= this.xs.map((_, i) => i).sort((a, b) => this.xs[a] - this.xs[b] || this.ys[a] - this.ys[b]);
    const at = this.order.indexOf(this.at), last = this.order.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    this.show(this.order[next]);
  }

  open(i) { if (i >= 0) showDetails(this.of[i]); }
}

function described(item, values) {
  const [x, y] = values, paid = state.x === "cost" ? x : cost(item);
  const parts = [
    item.cell.title + (isPrediction(item) ? "" : item.isRun ? `\n${item.file}, seed ${item.seed || "unknown"}` : `\nmean of ${runsText(item)}`),
    `${item.cell.model}: quality ${quality(y)}${item.quality === y ? between(item.qualityRange, quality) : ""}`,
    state.x === "time" ? `after ${time(x)}${x === item.minutes ? between(item.minutesRange, time) : ""}` : state.x === "samples" ? `after ${number(x, 6)} samples` : `for ${dollars(x)}`,
  ];
  if (state.x === "time" && paid !== null && x === item.minutes) parts.push(`for ${dollars(paid)}`);
  if (item.isRun || item.cell.kind in KINDS) parts.push(KINDS[item.cell.kind] || DATA.statuses[item.status]);
  return parts.join("\n");
}

function axis(largest) {
  if (state.x === "cost") return { unit: 1, label: "$" };
  if (state.x === "samples") return { unit: 1, label: "samples" };
  const of = state.clock === "training" ? "without evaluations" : "since run_start";
  if (largest < 5) return { unit: 60, label: `seconds ${of}` };
  return largest < 600 ? { unit: 1, label: `minutes ${of}` } : { unit: 1 / 60, label: `hours ${of}` };
}

function front(of) {
  return [...grouped(of, (item) => item.cell.task).values()].map((same) => {
    let best = -Infinity;
    return same.sort((a, b) => xOf(a) - xOf(b) || b.quality - a.quality).filter((item) => item.quality > best && ((best = item.quality), true));
  });
}

function grouped(of, keyOf) {
  const groups = new Map();
  for (const item of of) {
    const key = keyOf(item), known = groups.get(key);
    if (known) known.push(item); else groups.set(key, [item]);
  }
  return groups;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

const nothing = () => (state.x === "cost" ? "no cost is known: enter $/h under Prices" : "no run to draw");

function xRange(item) {
  if (state.x === "samples") return item.samplesRange;
  const perMinute = state.x === "cost" ? rates.get(item.cell.hardware) / 60 : 1;
  return item.minutesRange && item.minutesRange.map((minutes) => minutes * perMinute);
}

function widened([low, high], ranges) {
  // By intervals, but at most by half of what the points span: those of two runs are wide.
  const most = (high - low || Math.abs(high) * 0.2) / 2, [down, up] = [Math.max(low - most, low / 2), high + most];
  for (const range of ranges) if (range) { low = Math.min(low, Math.max(range[0], down)); high = Math.max(high, Math.min(range[1], up)); }
  return [low, high];
}

function drawIntervals(context, chart, drawn, unit) {
  const { box } = chart, within = (value, low, high) => Math.min(Math.max(value, low), high);
  context.lineWidth = 1.2; context.globalAlpha = drawn.length > 100 ? 0.3 : 0.75;
  for (const item of drawn) {
    const across = xRange(item), up = item.qualityRange, [x, y] = [chart.x(xOf(item) * unit), chart.y(item.quality)];
    if (!across && !up) continue;
    context.strokeStyle = categoryOf(item).colour;
    context.setLineDash(item.cell.kind === "predicted" ? [3, 3] : []);
    context.beginPath();
    if (across) {
      const [from, to] = across.map((value) => within(value > 0 ? chart.x(value * unit) : box.left, box.left, box.right));
      context.moveTo(from, y); context.lineTo(to, y);
    }
    if (up) {
      const [from, to] = up.map((value) => within(chart.y(value), box.top, box.bottom));
      context.moveTo(x, from); context.lineTo(x, to);
    }
    context.stroke();
  }
  context.globalAlpha = 1; context.setLineDash([]);
}

function drawScatter(chart) {
  const drawn = items.filter((item) => item.complete && item.quality !== null && xOf(item) !== null);
  $("front").textContent = "";
  if (!drawn.length) { chart.empty(nothing()); return; }
  const measured = drawn.filter((item) => item.cell.kind !== "predicted");
  const qualities = extent(drawn.map((item) => item.quality)), best = qualities[1];
  const [low, wide] = widened(qualities, drawn.map((item) => item.qualityRange));
  const high = Math.min(wide, best < 1 ? (1 + best) / 2 : best); // no quality is above 1, and 1 has no logarithm of its error
  const [least, largest] = widened(extent(drawn.map(xOf)), drawn.map(xRange));
  const { unit, label } = axis(largest);
  const context = chart.start(low, high, least * unit, largest * unit, label, 0.05);
  const place = (item) => [chart.x(xOf(item) * unit), chart.y(item.quality)];
  const fronts = front(measured);
  context.strokeStyle = chart.ink; context.setLineDash([5, 4]); context.lineWidth = 1;
  for (const members of fronts) {
    context.beginPath();
    members.forEach((item, i) => {
      const [x, y] = place(item);
      if (i) { context.lineTo(x, chart.y(members[i - 1].quality)); context.lineTo(x, y); } else context.moveTo(x, y);
    });
    context.lineTo(chart.box.right, chart.y(members.at(-1).quality));
    context.stroke();
  }
  const radius = drawn.length > 1000 ? 2.5 : drawn.length > 150 ? 3.5 : 4.5, alpha = drawn.length > 400 ? 0.55 : 0.85;
  drawIntervals(context, chart, drawn, unit);
  for (const [category, same] of grouped(drawn, categoryOf)) {
    for (const [kind, points] of grouped(same, (item) => item.cell.kind)) drawMarks(context, category, points.map(place), radius, alpha, kind);
  }
  for (const item of drawn) chart.add(item, ...place(item), [xOf(item), item.quality]);
  context.strokeStyle = chart.ink; context.setLineDash([]);
  for (const item of fronts.flat()) { context.beginPath(); context.arc(...place(item), radius + 3, 0, 7); context.stroke(); }
  const x = (item) => (state.x === "cost" ? dollars(xOf(item)) : state.x === "samples" ? `${number(xOf(item))} samples` : time(xOf(item)));
  const told = fronts.map((members) => {
    const named = members.slice(0, 8).map((item) => `${item.cell.name}${item.isRun ? " " + item.file.replace(/\.txt$/, "") : ""} ${quality(item.quality)} for ${x(item)}`);
    return `Pareto front of ${members[0].cell.task}: ${named.join("; ")}${members.length > 8 ? `; and ${members.length - 8} more` : ""}.`;
  });
  $("front").textContent = told.slice(0, 6).join(" ");
  chart.over.setAttribute("aria-label", `Scatter of ${drawn.length} points, quality against ${label}. ${told[0] || ""}`);
}

function drawCurves(chart) {
  const lines = [];
  for (const item of items) {
    const perMinute = state.x === "cost" ? rates.get(item.cell.hardware) : 60;
    if (perMinute === null || item.curve.length < 3) continue;
    const values = [];
    for (let i = 0; i < item.curve.length; i += 3) {
      const x = state.x === "samples" ? item.curve[i + 1] : item.curve[i] * perMinute / 60;
      if (x !== null && item.curve[i + 2] !== null && (x > 0 || !state.scale)) values.push([x, item.curve[i + 2], i + 2]);
    }
    if (values.length) lines.push({ item, values });
  }
  if (!lines.length) { chart.empty(nothing()); return; }
  let least = Infinity, largest = 0, low = 1, high = 0;
  for (const { values } of lines) for (const [x, y] of values) { if (x > largest) largest = x; if (x < least) least = x; if (y < low) low = y; if (y > high) high = y; }
  const { unit, label } = axis(largest);
  const context = chart.start(low, high, least * unit, largest * unit, label, 0.03);
  for (const line of lines) line.points = line.values.map(([x, y]) => [chart.x(x * unit), chart.y(y)]);
  const many = lines.length > MAX_DASHED;
  drawTargets(context, chart, lines);
  if (lines.length <= MAX_BANDS) for (const line of lines) if (!line.item.isRun) drawBand(context, chart, line);
  for (const [category, same] of grouped(lines, ({ item }) => categoryOf(item))) {
    context.strokeStyle = category.colour;
    context.lineWidth = many ? 1 : 1.5;
    context.setLineDash(many ? [] : category.dash);
    context.globalAlpha = Math.max(0.25, Math.min(0.9, 60 / lines.length));
    context.beginPath();
    for (const { points } of same) {
      let [lastX, lastY] = [NaN, NaN];
      points.forEach(([x, y], i) => {
        if (i === 0) context.moveTo(x, y);
        else if (Math.abs(x - lastX) + Math.abs(y - lastY) > 1 || i === points.length - 1) context.lineTo(x, y); else return;
        [lastX, lastY] = [x, y];
      });
    }
    context.stroke();
    drawMarks(context, category, same.map(({ points }) => points.at(-1)), many ? 2 : 3.5, many ? 0.5 : 0.9);
  }
  for (const { item, points, values } of lines) points.forEach(([x, y], i) => chart.add(item, x, y, values[i]));
  chart.over.setAttribute("aria-label", `Curves of ${lines.length} ${state.show === "means" ? "means of runs" : "runs"}, quality against ${label}${lines.length <= MAX_BANDS && state.show === "means" ? ", bands are 95 % intervals of the quality" : ""}.`);
}

function drawBand(context, chart, { item, values, points }) {
  const complete = item.runs.filter((run) => run.complete), { box } = chart;
  const ranges = values.map(([, , i]) => (i === item.curve.length - 1 ? item.qualityRange : interval(complete.map((run) => run.curve[i]), item.cell.quality_step)));
  if (!ranges[0]) return;
  const edge = (side) => points.map(([x], i) => [x, Math.min(Math.max(chart.y(ranges[i][side]), box.top), box.bottom)]);
  context.fillStyle = categoryOf(item).colour; context.globalAlpha = 0.15;
  context.beginPath();
  for (const [x, y] of [...edge(0), ...edge(1).reverse()]) context.lineTo(x, y);
  context.fill();
  context.globalAlpha = 1;
}

function drawTargets(context, chart, lines) {
  const targets = unique(lines.filter(({ item }) => !item.cell.study && item.cell.target !== null).map(({ item }) => item.cell.target));
  context.strokeStyle = context.fillStyle = chart.ink;
  context.lineWidth = 1; context.setLineDash([2, 4]); context.textAlign = "right"; context.textBaseline = "bottom";
  for (const target of targets.slice(0, 4)) {
    const y = chart.y(target);
    if (y < chart.box.top || y > chart.box.bottom) continue;
    context.beginPath(); context.moveTo(chart.box.left, y); context.lineTo(chart.box.right, y); context.stroke();
    context.fillText(`target ${target}`, chart.box.right, y - 2);
  }
}

// ---- the table: only the rows in sight are in the page ----

const text = (value, as) => (value === null || value === undefined || Number.isNaN(value) ? "-" : as(value));
const TABLE = [
  { id: "name", title: "run", width: 31, left: true, of: (i) => i.cell.title + (i.file || ""), show: nameCell },
  { id: "model", title: "benchmark", width: 10.5, left: true, of: (i) => i.cell.key, show: modelCell },
  { id: "recipe", title: "configuration", width: 15, left: true, of: (i) => i.cell.configuration },
  { id: "budget", title: "budget", width: 5, of: (i) => i.cell.budget, show: (i) => text(i.cell.budget, (v) => `${v}`) },
  { id: "seed", title: "seed", width: 7, of: (i) => (i.isRun ? i.seed : i.n), show: (i) => (i.isRun || isPrediction(i) ? i.seed || "-" : runsText(i)) },
  { id: "time", title: "time", width: 6.5, of: (i) => i.minutes, show: (i) => text(i.minutes, time) },
  { id: "cost", title: "cost", width: 7, of: cost, show: (i) => text(cost(i), dollars) },
  { id: "quality", title: "quality", width: 5, of: (i) => i.quality, show: (i) => text(i.quality, quality) },
  { id: "samples", title: "samples", width: 6.5, of: (i) => i.samples, show: (i) => text(i.samples, (v) => number(v, 9)) },
  { id: "rate", title: "samples/s", width: 6, of: (i) => i.samples_per_s, show: (i) => text(i.samples_per_s, number) },
  { id: "status", title: "status", width: 9, left: true, of: (i) => (i.isRun ? i.status : i.num - i.n), show: (i) => (i.isRun || i.cell.kind === "predicted" ? DATA.statuses[i.isRun ? i.status : i.runs[0].status] : `${i.n} of ${i.num} complete`) },
  { id: "audit", title: "audit", width: 9, left: true, of: (i) => i.errors * 1e6 + i.warnings, show: auditCell },
  { id: "methods", title: "methods", width: 16, left: true, of: (i) => i.cell.methodNames },
];
let sorted = [], drawnFrom = -1;

function nameCell(item) {
  return item.isRun ? [el("a", { href: item.href }, item.file), ` ${item.cell.title}`] : item.cell.title;
}

function modelCell(item) {
  return item.cell.proxy ? [`${item.cell.key} `, el("span", { className: "proxy" }, "proxy")] : item.cell.key;
}

function auditText(of) {
  if (!isMeasured(of)) return "-"; // there is no log
  if (!of.errors && !of.warnings) return "no finding";
  return `${of.errors} ${of.errors === 1 ? "error" : "errors"}, ${of.warnings} ${of.warnings === 1 ? "warning" : "warnings"}`;
}

function auditCell(item) { return el("span", { className: item.errors ? "error" : "" }, auditText(item)); }

function sortItems() {
  const order = { timeSameQuality: [(i) => timeBound(i, 1)], costSameQuality: [(i) => { const bound = timeBound(i, 1); return bound === null || cost(i) === null ? null : cost(i) * bound / i.minutes; }] }[state.sortBy];
  const best = { qualitySameTime: (i) => i.minutes, qualitySameCost: cost }[state.sortBy];
  const bounds = reference ? limits() : null;
  const isRanked = (i) => i.complete && i.cell.kind !== "predicted" && i.cell.task === reference.cell.task;
  let key, meets = null;
  if (order) {
    key = order[0];
    if (bounds) meets = (i) => isRanked(i) && i.quality >= bounds.quality && hasNoMiss(i);
  } else if (best) {
    key = (i) => { const bound = qualityBound(i, 0); return bound === null ? null : -bound; };
    const most = bounds && (state.sortBy === "qualitySameTime" ? bounds.minutes : bounds.dollars);
    if (bounds) meets = (i) => isRanked(i) && best(i) !== null && most !== null && best(i) <= most;
  } else {
    key = TABLE.find((column) => column.id === state.sortBy.replace("-", ""))?.of || TABLE[0].of;
  }
  const descending = state.sortBy.startsWith("-") ? -1 : 1;
  const keyed = items.map((item, i) => ({ item, i, value: key(item), last: meets ? !meets(item) : false }));
  keyed.sort((a, b) => {
    if (a.last !== b.last) return a.last ? 1 : -1;
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null) || a.i - b.i;
    const order_ = typeof a.value === "string" ? collator.compare(a.value, b.value) : a.value - b.value;
    return order_ * descending || a.i - b.i;
  });
  sorted = keyed.map(({ item }) => item);
}

function drawTable() {
  sortItems();
  const now = state.sortBy.replace("-", "");
  for (const [i, header] of [...$("rows").querySelectorAll("th")].entries()) {
    const up = !state.sortBy.startsWith("-"), isSorted = TABLE[i] && TABLE[i].id === now;
    header.setAttribute("aria-sort", isSorted ? (up ? "ascending" : "descending") : "none");
    header.querySelector("span")?.replaceChildren(isSorted ? (up ? " \u25b2" : " \u25bc") : "");
  }
  $("rows").querySelector("table").setAttribute("aria-rowcount", sorted.length + 1);
  drawnFrom = -1;
  drawRows();
}

function drawRows() {
  const host = $("rows"), most = Math.max(0, sorted.length - 1);
  const from = Math.min(most, Math.max(0, Math.floor(host.scrollTop / ROW_PX) - 8)) & ~1;
  if (from === drawnFrom) return;
  drawnFrom = from;
  const to = Math.min(sorted.length, from + NUM_ROWS);
  const spacer = (count) => el("tr", { className: "spacer", "aria-hidden": "true" }, el("td", { colSpan: TABLE.length + 1, style: `height:${count * ROW_PX}px` }));
  const body = [];
  if (from) body.push(spacer(from));
  for (let i = from; i < to; i++) {
    const item = sorted[i], row = el("tr", { "aria-rowindex": i + 2 });
    for (const column of TABLE) {
      const shown = column.show ? column.show(item) : column.of(item), cell = el("td", { className: column.left ? "text" : "" });
      cell.append(...[shown].flat());
      if (column.left) cell.title = cell.textContent;
      row.append(cell);
    }
    const button = el("button", { type: "button", "aria-label": `more about ${item.file || ""} ${item.cell.title}` }, "more");
    button.addEventListener("click", () => showDetails(item));
    row.append(el("td", {}, button));
    body.push(row);
  }
  if (to < sorted.length) body.push(spacer(sorted.length - to));
  host.querySelector("tbody").replaceChildren(...body);
}

// ---- prices, throughput, one run ----

const priceRows = new Map();

function buildPrices() {
  const clouds = unique(DATA.prices.map((price) => price.cloud));
  field("cloud").append(el("option", { value: "" }, "none: own prices"), ...clouds.map((cloud) => el("option", { value: cloud }, cloud)));
  for (const hardware of unique(cells.map((cell) => cell.hardware))) {
    const input = el("input", { type: "number", min: 0, step: "any", "aria-label": `dollars for an hour of ${hardware}` });
    const choice = el("select", { "aria-label": `price of ${hardware} from the table` }, el("option", { value: "" }, "choose"));
    const source = el("td"), offers = [];
    for (const price of DATA.prices) {
      if (!(hardware in price.fits)) continue;
      price.fits[hardware].forEach((dollars_, isSpot) => {
        if (dollars_ === null) return;
        offers.push({ price, dollars: dollars_ });
        choice.append(el("option", { value: offers.length - 1 }, `${dollars_} ${price.name}, ${price.region}${isSpot ? ", spot" : ""}, ${price.date}`));
      });
    }
    choice.disabled = !offers.length;
    if (!offers.length) choice.options[0].textContent = "no row is of such devices";
    const set = (dollars_) => { if (dollars_ > 0) state.prices.set(hardware, dollars_); else state.prices.delete(hardware); later(); };
    input.addEventListener("input", (event) => { event.stopPropagation(); set(Number(input.value)); });
    choice.addEventListener("input", (event) => {
      event.stopPropagation();
      if (choice.value !== "") { input.value = offers[choice.value].dollars; set(offers[choice.value].dollars); }
    });
    const row = el("tr", {}, el("td", {}, hardware), el("td", {}, input), el("td", {}, choice), source);
    priceRows.set(hardware, { row, input, source, offers });
    $("prices").tBodies[0].append(row);
  }
}

function drawPrices() {
  const shown = new Set(visible.map((run) => run.cell.hardware));
  for (const [hardware, { row, input, source, offers }] of priceRows) {
    row.hidden = !shown.has(hardware);
    const dollars_ = rates.get(hardware);
    if (document.activeElement !== input) input.value = dollars_ === null ? "" : dollars_;
    const stated = offers.filter((offer) => offer.dollars === dollars_ && (state.prices.has(hardware) || offer.price.cloud === state.cloud));
    source.textContent = stated.map(({ price }) => `${price.instance}, ${price.date}: ${price.source}`).join("; or ") || (dollars_ === null ? "" : "entered here");
  }
}

function drawBenches() {
  const terms = state.q.toLowerCase().split(/\s+/).filter(Boolean), rows = [];
  for (const bench of DATA.benches) {
    if (state.model && bench.model !== state.model) continue;
    if ((state.size && bench.size !== state.size) || (state.hardware.size && !state.hardware.has(bench.hardware))) continue;
    for (const each of bench.rates) {
      if (state.recipe.size && !state.recipe.has(each.configuration.split("+")[0])) continue;
      const searched = `${bench.file} ${each.configuration} ${each.shape} ${bench.benchmark}`.toLowerCase();
      if (terms.every((term) => searched.includes(term))) rows.push([bench, each]);
    }
  }
  const share = (value) => text(value, (v) => `${(v * 100).toFixed(0)} %`);
  $("bench-note").textContent = rows.length > MAX_BENCH_ROWS ? `The first ${MAX_BENCH_ROWS} of ${rows.length} figures; filter for others.`
    : rows.length ? "What `ttt bench` measured on synthetic batches." : "No bench result is chosen.";
  $("benches").tBodies[0].replaceChildren(...rows.slice(0, MAX_BENCH_ROWS).map(([bench, each]) => {
    const size = el("td", {}, `${bench.size} `);
    if (bench.size !== "full") size.append(el("span", { className: "proxy" }, "proxy"));
    const cells_ = [bench.hardware, each.shape, text(each.batch, number), number(each.samples_per_s),
      text(each.step_ms, number), share(each.flops_share), share(each.bytes_share), bench.file];
    return el("tr", {}, el("td", {}, each.configuration), el("td", {}, bench.benchmark), size, ...cells_.map((value) => el("td", {}, value)));
  }));
}

function showDetails(item) {
  const cell = item.cell, facts = [
    ["benchmark", `${cell.model}${cell.proxy ? ", says nothing about the full benchmark" : ""}`], ["system", cell.hardware], ["study", cell.study || "none: scored runs"], ...(cell.kind in KINDS ? [["source", `${KINDS[cell.kind]}: ${cell.lines[0].replace("source: ", "")}`]] : []),
    ["configuration", cell.configuration], ["methods", cell.methodNames || "none"], ["training", `${cell.duration || "unknown"}, budget ${text(cell.budget, (v) => v)}`],
    ["quality", text(item.quality, quality) + (item.qualityRange ? between(item.qualityRange, quality) : "")],
    ["time", text(item.minutes, time) + (item.minutesRange ? between(item.minutesRange, time) : "")],
    ["cost", text(cost(item), dollars)], ["samples", text(item.samples, (v) => number(v, 9))], ["samples/s", text(item.samples_per_s, number)],
  ];
  if (item.isRun && !isPrediction(item)) facts.push(["seed", item.seed || "unknown"], ["status", DATA.statuses[item.status]], ["commit", item.commit || "unknown"]);
  facts.push(["audit", auditText(item)]);
  const list = el("dl");
  for (const [name, value] of facts) list.append(el("dt", {}, name), el("dd", {}, `${value}`));
  const close = el("button", { type: "button" }, "Close");
  close.addEventListener("click", () => $("details").close());
  const parts = [el("h2", { id: "details-title" }, `${cell.title}${isPrediction(item) ? "" : item.isRun ? ", " + item.file : ", mean of " + runsText(item)}`), list];
  const told = (of) => of.findings.map((finding) => el("li", {}, DATA.texts[finding]));
  const findings = item.isRun ? told(item) : [];
  if (findings.length) parts.push(el("h3", {}, "Findings"), el("ul", {}, ...findings));
  if (cell.about.findings.length) parts.push(el("h3", {}, "Findings about its system's description"), el("ul", {}, ...told(cell.about)));
  const isOfLogs = cell.kind === "measured", logs = el("p", {}, isOfLogs ? (item.isRun ? "Log: " : "Logs: ") : "Stated in: ");
  for (const run of item.isRun ? [item] : item.runs.slice(0, isOfLogs ? 50 : 1)) logs.append(el("a", { href: run.href }, isOfLogs ? run.file : decodeURI(run.href)), " ");
  parts.push(logs);
  if (reference && isOfLogs && reference.cell.kind === "measured" && cell !== reference.cell && cell.task === reference.cell.task) {
    const [there, here] = [new Set(reference.cell.lines), new Set(cell.lines)];
    const lines = [...reference.cell.lines.filter((line) => !here.has(line)).map((line) => `- ${line}`), ...cell.lines.filter((line) => !there.has(line)).map((line) => `+ ${line}`)];
    parts.push(el("h3", {}, `Differs from ${reference.cell.title}`), el("pre", { tabIndex: 0 }, lines.join("\n") || "in nothing that its log states"));
  }
  $("details").replaceChildren(...parts, close);
  $("details").showModal();
}

// ---- wiring ----

const facetBoxes = {}, methodBoxes = new Map(), charts = {};

function buildForm() {
  const named = { resnet: "ResNet", bert: "BERT" };
  const options = (values, all, title = (value) => value) => [el("option", { value: "" }, all), ...values.map((value) => el("option", { value }, title(value)))];
  field("model").append(...options(unique(cells.map((cell) => cell.benchmark)), "all", (value) => named[value] || value));
  field("size").append(...options(unique(cells.map((cell) => cell.size)), "all", (value) => (value === "full" ? value : `${value}: a proxy`)));
  for (const column of TABLE) for (const sign of ["", "-"]) field("sortBy").append(el("option", { value: sign + column.id }, `${column.title}${sign && ", descending"}`));
  for (const name in FACETS) {
    const host = form.querySelector(`[data-facet=${name}]`);
    facetBoxes[name] = new Map(FACETS[name].values.map((value) => {
      const input = el("input", { type: "checkbox", value }), count = el("small");
      host.append(el("label", {}, input, el("span", {}, value), count));
      return [value, { input, count }];
    }));
  }
  const order = DATA.methods.map((_, method) => method).sort((a, b) => collator.compare(DATA.methods[a], DATA.methods[b]));
  for (const method of order) {
    const select = el("select", {}, ...[["", "any"], ["has", "with"], ["not", "without"]].map(([value, title]) => el("option", { value }, title)));
    const count = el("small");
    form.querySelector(".methods").append(el("label", {}, select, el("span", {}, DATA.methods[method]), count));
    methodBoxes.set(method, { select, count });
  }
}

function buildTable() {
  for (const column of TABLE) {
    const button = el("button", { type: "button" }, column.title, el("span"));
    button.addEventListener("click", () => {
      field("sortBy").value = state.sortBy = state.sortBy === column.id ? `-${column.id}` : column.id;
      later();
    });
    $("rows").querySelector("colgroup").append(el("col", { style: `width:${column.width}rem` }));
    $("rows").querySelector("thead tr").append(el("th", { scope: "col", className: column.left ? "text" : "" }, button));
  }
  $("rows").querySelector("colgroup").append(el("col", { style: "width:5rem" }));
  $("rows").querySelector("thead tr").append(el("th", { scope: "col" }, "details"));
  $("rows").querySelector("table").style.width = `${TABLE.reduce((sum, column) => sum + column.width, 5)}rem`;
  $("rows").addEventListener("scroll", drawRows, { passive: true });
}

function update() {
  setClock();
  filter();
  rates = new Map([...priceRows.keys()].map((hardware) => [hardware, rate(hardware)]));
  means = meansOf(visible);
  for (const item of means) item.cell.numShown = item.n;
  items = state.show === "means" ? means.filter((item) => item.num) : visible;
  categorise();
  chooseReference();
  const shown = visible.filter(isMeasured), left = shown.filter((run) => !run.complete).length;
  const cellsOf = (kind) => means.filter((item) => item.cell.kind === kind).length;
  const count = (number_, one, many) => (number_ ? `; ${number_.toLocaleString("en")} ${number_ === 1 ? one : many}` : "");
  const other = state.ends === "budget" ? "stopped at the target" : "trained to the end of a budget";
  $("table-title").textContent = state.show === "means" ? "Means of runs" : "Runs";
  const recipes = cellsOf("measured");
  $("status").textContent = `${shown.length.toLocaleString("en")} of ${numMeasured.toLocaleString("en")} runs in ${recipes.toLocaleString("en")} ${recipes === 1 ? "recipe" : "recipes"}`
    + count(left, "incomplete: in no mean, answer or front", "incomplete: in no mean, answer or front")
    + count(cellsOf("published"), "published set", "published sets") + count(cellsOf("predicted"), "prediction", "predictions")
    + count(numElsewhere, `run ${other} is left out`, `runs ${other} are left out`);
  drawAnswers();
  drawLegend();
  drawScatter(charts.scatter);
  drawCurves(charts.curves);
  drawTable();
  drawPrices();
  drawBenches();
  clearTimeout(saving);
  saving = setTimeout(() => { if (address() !== (location.hash || "#")) history.replaceState(null, "", address()); }, 200);
}

let frame = 0, saving = 0;
function later() { frame ||= requestAnimationFrame(() => { frame = 0; update(); }); }

buildForm();
buildTable();
buildPrices();
charts.scatter = new Chart("scatter");
charts.curves = new Chart("curves");
readAddress();
fillForm();
update();
if (matchMedia("(max-width: 60rem)").matches) $("drawer").open = false;
document.addEventListener("input", (event) => {
  if (event.target.form !== form) return;
  if (event.target.name === "cloud" || event.target.name === "spot") state.prices.clear();
  readForm();
  $("rows").scrollTop = 0;
  later();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", (event) => {
  event.preventDefault();
  history.replaceState(null, "", "#");
  readAddress();
  fillForm();
  later();
});
window.addEventListener("hashchange", () => { readAddress(); fillForm(); later(); });
window.addEventListener("resize", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
