const START = JSON.parse(document.getElementById("start").textContent);
const MAIN = document.querySelector("main"), STATUS = document.getElementById("status");
const form = document.getElementById("workload");
const COUNTS = ["gpus", "tensor", "pipeline", "context", "zero", "micro_batch_size"];
const QUESTION = ["input_tokens", "output_tokens", "users", "ttft_ms", "tpot_ms", "price_per_hour", "area_mm2", "power_w"];
const LISTS = { serving: START.decoders, codesign: START.shapes };  // models that a tab is for, where not for all
const USUAL = "llama-3.1-8b";
const TAKES = { serving: "some seconds", power: "some seconds", design: "half a minute the first time, seconds after",
  codesign: "half a minute the first time, ten seconds after" };
const STEP = 0.005;  // of sliders, in logarithms
const TABS = [...document.querySelectorAll("#tabs button")];
const machine = { base: START.first.gpu, figures: {}, sliders: [] };
let held = null, tab = "one", drawn = [], front = { of: "", watts: [] };
let answered = null;  // the question whose answer is shown
let shown = 0, busy = false, again = false, running = null, last = "";

const at = (id) => document.getElementById(id);
const pause = () => new Promise((done) => setTimeout(done, 0));
const live = () => tab === "one" || tab === "cluster";
function made(kind, properties, ...children) {
  const node = Object.assign(document.createElement(kind), properties);
  node.append(...children);
  return node;
}
function fill(select, names, chosen, empty) {
  select.replaceChildren(...names.map((name) => new Option(name || empty, name)));
  select.value = chosen;
}
function say(text, error) {
  STATUS.textContent = text;
  STATUS.className = error ? "error" : "";
}
function workload() {
  const fields = new FormData(form), length = fields.get("sequence_length");
  return { model: fields.get("model"), mode: fields.get("mode"), batch_size: Number(fields.get("batch_size")),
    sequence_length: length ? Number(length) : null, dtype: fields.get("dtype"), recompute: fields.get("recompute"),
    ...Object.fromEntries(COUNTS.map((name) => [name, Number(fields.get(name))])) };
}
const machines = () => (held && live() ? [held, machine] : [machine]);
function request(list) {
  return { workload: workload(), machines: list.map(({ base, figures }) => ({ base, figures })) };
}
function named(list) {  // what is forecast, in words
  const { model, mode, dtype, gpus } = workload();
  const count = gpus > 1 ? `${gpus}x ` : "";
  return [model, dtype, mode, "on", list.map(({ base }) => count + base).join(" and ")].filter(Boolean).join(" ");
}
async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(`${path}${path.includes("?") ? "&" : "?"}token=${START.token}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the explorer does not answer; is it still running?");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let line = text.trim();
  try { line = JSON.parse(text).error; } catch { /* a plain line */ }
  throw new Error(line);
}
function post(path, body, signal) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body), signal });
}

// The state of the page is in its address, so that a link brings it back.
function remember() {
  const state = new URLSearchParams({ tab, gpu: machine.base });
  for (const [name, value] of new FormData(form)) if (value) state.set(name, value);
  for (const [name, value] of Object.entries(machine.figures)) state.set(`figure.${name}`, value);
  if (held) state.set("A", JSON.stringify({ base: held.base, figures: held.figures }));
  history.replaceState(null, "", `#${state}`);
}
function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of state) {
    if (form.elements[name]) form.elements[name].value = value;
    if (name.startsWith("figure.")) machine.figures[name.slice(7)] = Number(value);
  }
  machine.base = state.get("gpu") || machine.base;
  try { held = JSON.parse(state.get("A")); } catch { /* no machine is held */ }
  return state.get("tab");
}

function stale() {  // numbers on the page are of what was asked before
  const now = named(machines());
  MAIN.classList.add("stale");
  remember();
  if (!live()) {
    MAIN.classList.add("renamed");
    say("press Answer");
    return;
  }
  if (now === last) return;
  MAIN.classList.add("renamed");  // and stand under a name that is not theirs
  say(`forecasting ${now}`);
  if (running) running.abort();  // its answer is of the name before
}
function blank() {
  last = "";
  drawn = [];
  for (const id of ["sentence", "notes", "plots"]) at(id).replaceChildren();
  document.querySelectorAll(".cards, pre").forEach((part) => part.replaceChildren());
  for (const id of ["helps", "differences", "tables"]) at(id).hidden = true;
  at("report").hidden = !live();
}
function failed(error) {
  blank();
  MAIN.classList.remove("stale", "renamed");
  say(error.message, true);
}
async function save(path, name) {
  const body = live() || path !== "report.html" ? request([machine]) : answered;
  try {
    made("a", { href: URL.createObjectURL(await (await post(path, body)).blob()), download: name }).click();
  } catch (error) { say(error.message, true); }
}
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("copied");
  } catch { say("the browser does not let the page copy; mark the text", true); }
}

function showCards(list) {
  document.querySelector("#answer .cards").replaceChildren(...list.map((texts) => made("div", { className: "card" },
    ...["name", "value", "detail"].map((kind, place) => made("div", { className: kind, textContent: texts[place] })))));
}
function showList(place, lines) {
  place.replaceChildren(...lines.map((line) => made("li", { textContent: line })));
}
function showDifferences(rows) {
  at("differences").hidden = !rows.length;
  const head = ["", "A", "B", "B - A", "B / A"].map((text) => made("th", { scope: "col", textContent: text }));
  at("differences").querySelector("table").replaceChildren(made("thead", {}, made("tr", {}, ...head)),
    made("tbody", {}, ...rows.map((row) => made("tr", {}, ...row.map((text, place) =>
      made(place ? "td" : "th", { textContent: text }))))));
}
function showFigures(figures) {
  for (const slider of machine.sliders) {
    const value = figures[slider.name] ?? slider.value;  // what nothing holds is as the base has it
    if (document.activeElement !== slider.number) slider.number.value = Number((value / slider.scale).toPrecision(4));
    slider.row.classList.toggle("moved", Math.abs(value / slider.value - 1) > 1e-6);
    if (document.activeElement !== slider.input) slider.input.value = Math.log(value / slider.value);
  }
}
async function showPlots(plots) {
  const place = at("plots");
  drawn = plots;
  while (place.children.length < plots.length) {
    place.append(made("figure", { innerHTML: "<figcaption><h2></h2><p></p></figcaption><div class='plot'></div>" }));
  }
  while (place.children.length > plots.length) place.lastChild.remove();
  const figures = [...place.children];
  const seen = figures.map((figure) => figure.getBoundingClientRect()).map(({ top, bottom }) => bottom > 0 && top < innerHeight);
  const order = [...plots.keys()].sort((one, other) => seen[other] - seen[one]);
  for (const number of order) {  // one after another, so that the next move waits for one picture at most
    if (again) return;
    const { title, caption, layout } = plots[number], spot = figures[number].querySelector(".plot");
    figures[number].querySelector("h2").textContent = title;
    figures[number].querySelector("p").textContent = caption;
    spot.style.minHeight = `${layout.height}px`;
    await drawPlot(spot, plots[number]);
    await pause();
  }
}
async function showStep(answer) {
  const step = answer.machines.at(-1);
  at("sentence").textContent = step.sentence;
  showCards(step.cards);
  at("helps").hidden = false;
  showList(at("helps").querySelector("ul"), step.helps);
  showDifferences(answer.differences);
  showFigures(step.figures);
  showList(at("notes"), step.notes);
  at("command").querySelector("pre").textContent = answer.command;
  at("cell").querySelector("pre").textContent = answer.cell;
  at("tables").hidden = true;
  form.elements.sequence_length.placeholder = answer.sequence_length || "";
  say(`checkpoint ${step.checkpoint}`);
  document.documentElement.dataset.shown = ++shown;
  await pause();
  await showPlots(answer.plots);
}
async function showReport(answer) {
  at("sentence").textContent = answer.sentence;
  showCards(answer.cards);
  showList(at("notes"), answer.assumes);
  at("tables").hidden = false;
  at("tables").querySelector("div").innerHTML = answer.tables;
  const watts = answer.budgets.power_w;
  at("drag").hidden = !watts;
  if (watts && at("drag").dataset.base !== String(watts)) {
    at("drag").dataset.base = watts;
    Object.assign(at("budget"), { min: Math.round(watts / 2), max: Math.round(2 * watts), step: 1, value: Math.round(watts) });
  }
  document.documentElement.dataset.shown = ++shown;
  await showPlots(answer.plots);
}

async function update() {
  stale();
  if (!live()) return;
  if (busy) { again = true; return; }
  busy = true;
  do {
    again = false;
    const list = machines(), name = named(list);
    const timer = setTimeout(() => say(`compiling ${name}, once`), 700);
    running = new AbortController();
    try {
      const answer = await (await post("forecast", request(list), running.signal)).json();
      clearTimeout(timer);
      if (name !== named(machines()) || !live()) continue;  // its answer is of the name before
      last = name;
      await showStep(answer);
      if (!again) MAIN.classList.remove("stale", "renamed");
    } catch (error) { if (error.name !== "AbortError") failed(error); } finally { clearTimeout(timer); }
  } while (again);
  busy = false;
}
async function question() {
  const fields = new FormData(form), kind = tab;
  const numbers = QUESTION.filter((name) => fields.get(name)).map((name) => [name, Number(fields.get(name))]);
  const body = { ...request([machine]), question: { kind, ...Object.fromEntries(numbers) } };
  if (kind === "design") {
    const of = JSON.stringify([request([machine]), fields.get("area_mm2")]);
    if (of !== front.of) front = { of, watts: [] };
    body.question.front_w = front.watts;
    front.watts = [...new Set([...front.watts, Number(fields.get("power_w"))])].slice(-START.budgets);
  }
  const before = JSON.stringify(body), begun = Date.now();
  stale();
  say(`searching; it takes ${TAKES[kind]}`);
  const ticking = setInterval(() => { at("elapsed").textContent = `${Math.round((Date.now() - begun) / 1000)} s`; }, 1000);
  try {
    const answer = await (await post("question", body)).json();
    if (kind !== tab || before !== JSON.stringify({ ...request([machine]), question: body.question })) return;
    blank();
    answered = body;
    at("report").hidden = false;
    await showReport(answer);
    MAIN.classList.remove("stale", "renamed");
    say("answered");
  } catch (error) { if (kind === tab) failed(error); } finally {
    clearInterval(ticking);
    at("elapsed").textContent = "";
  }
}

function move(slider, value) {
  const count = slider.name === "num_sms" ? Math.max(1, Math.round(value)) : value;
  machine.figures[slider.name] = count;
  if (Math.abs(count / slider.value - 1) < 1e-9) delete machine.figures[slider.name];  // as the base has it
  update();
}
function sliderOf(slider) {
  const id = `figure-${slider.name}`, text = { textContent: slider.label };
  const end = (value) => STEP * Math.trunc(Math.log(value / slider.value) / STEP);  // so that the base is on a step
  const input = made("input", { type: "range", id, name: slider.name, step: STEP, min: end(slider.low), max: end(slider.high),
    value: 0 });
  const number = made("input", { type: "number", step: "any", min: 0 });
  number.setAttribute("aria-label", slider.label);
  number.setAttribute("list", `${id}-gpus`);
  const spot = (value) => 100 * Math.log(value / slider.low) / Math.log(slider.high / slider.low);
  const ticks = slider.ticks.map(([gpu, value]) => {
    const text = `${gpu}: ${Number((value / slider.scale).toPrecision(4))}`;
    const tick = made("span", { title: text });
    tick.style.left = `${spot(value)}%`;
    tick.addEventListener("click", () => move(slider, value));
    return tick;
  });
  const base = made("span", { className: "base", title: `${machine.base}, as it is` });
  base.style.left = `${spot(slider.value)}%`;
  base.addEventListener("click", () => move(slider, slider.value));
  const real = slider.ticks.map(([gpu, value]) => new Option(gpu, Number((value / slider.scale).toPrecision(4))));
  input.addEventListener("input", () => move(slider, slider.value * Math.exp(Number(input.value))));
  number.addEventListener("change", () => { if (number.value) move(slider, Number(number.value) * slider.scale); });
  const row = made("div", { className: "slider" }, made("label", { htmlFor: id, ...text }), input, number,
    made("div", { className: "ticks" }, base, ...ticks), made("datalist", { id: `${id}-gpus` }, ...real));
  row.querySelector(".ticks").setAttribute("aria-hidden", "true");
  return { ...slider, row, input, number };
}
async function choose(base, figures = {}) {
  Object.assign(machine, { base, figures });
  stale();
  const gpus = tab === "cluster" ? workload().gpus : 1;
  let list;
  try {
    list = await (await ask(`sliders?gpu=${encodeURIComponent(base)}&gpus=${gpus}`)).json();
  } catch (error) { failed(error); return; }
  if (machine.base !== base) return;
  machine.sliders = list.map(sliderOf);
  const groups = [...new Set(list.map((slider) => slider.group))].map((group) => {
    const rows = machine.sliders.filter((slider) => slider.group === group).map((slider) => slider.row);
    if (group !== "Peaks") return made("fieldset", {}, made("legend", { textContent: group }), ...rows);
    return made("details", {}, made("summary", { textContent: "Peaks" }), ...rows);
  });
  at("sliders").replaceChildren(...groups);
  showFigures({ ...Object.fromEntries(list.map(({ name, value }) => [name, value])), ...figures });
  await update();
}
async function hold() {
  held = held ? null : { base: machine.base, figures: { ...machine.figures } };
  showHeld();
  await update();
}
function showHeld() {
  for (const id of ["command", "cell"]) at(id).hidden = !live();
  at("hold").textContent = held ? "Let go of A" : "Hold as A";
  at("hold").setAttribute("aria-pressed", Boolean(held));
  at("hold").hidden = !live();
}
async function select(name) {
  const before = tab;
  tab = name;
  TABS.forEach((button) => {
    button.setAttribute("aria-selected", button.dataset.tab === tab);
    button.tabIndex = button.dataset.tab === tab ? 0 : -1;
  });
  document.querySelectorAll("[data-tabs]").forEach((part) => { part.hidden = !part.dataset.tabs.split(" ").includes(tab); });
  const { gpus, mode } = form.elements;
  if (tab !== "cluster") gpus.value = 1;
  else if (gpus.value < 2) [gpus.value, mode.value] = [8, "training"];
  const joined = (tab === "cluster") === (before === "cluster");
  if (!joined) {  // links are figures of a cluster alone
    held = null;
    mode.value = tab === "cluster" ? "training" : START.modes[0];
  }
  offer();
  fillBatch();
  showHeld();
  if (before !== tab) blank();
  await choose(machine.base, joined ? machine.figures : {});
}
function offer() {  // models that the tab is for, and modes that the model has
  const { model, mode } = form.elements, list = LISTS[tab] || START.models;
  fill(model, list, list.includes(model.value) ? model.value : list.includes(USUAL) ? USUAL : list[0]);
  const modes = START.decoders.includes(model.value) ? START.modes : START.modes.slice(0, 2);
  fill(mode, modes, modes.includes(mode.value) ? mode.value : modes[0]);
}
function fillWays() {  // a forward pass is split over all GPUs, training is as it was laid out
  const { gpus, mode, tensor } = form.elements;
  if (tab === "cluster") tensor.value = mode.value === "training" ? 1 : gpus.value;
}
function fillBatch() {  // every replica has something to do
  const { gpus, batch_size: batch } = form.elements;
  if (batch.value % gpus.value) batch.value = gpus.value;
}
async function changed(event) {
  if (event.target.name === "gpus") {
    const many = Number(event.target.value) > 1;
    fillBatch();
    if (many !== (tab === "cluster")) { await select(many ? "cluster" : "one"); return; }
  }
  if (event.target.name === "model") offer();
  if (event.target.name === "mode" || (event.target.name === "gpus" && form.elements.mode.value !== "training")) fillWays();
  await update();
}

fill(form.elements.model, START.models, START.first.model);
fill(form.elements.mode, START.modes, START.first.mode || "inference");
fill(form.elements.dtype, START.dtypes, START.first.dtype || "", "the model's own");
fill(form.elements.recompute, START.recompute, "none");
fill(at("gpu"), START.gpus.includes(machine.base) ? START.gpus : [machine.base, ...START.gpus], machine.base);
form.addEventListener("submit", (event) => { event.preventDefault(); if (!live()) question(); });
form.addEventListener("change", changed);
at("budget").addEventListener("input", () => { form.elements.power_w.value = at("budget").value; stale(); });
at("budget").addEventListener("change", (event) => { event.stopPropagation(); question(); });
at("gpu").addEventListener("change", (event) => choose(event.target.value));
at("reset").addEventListener("click", () => choose(machine.base));
at("hold").addEventListener("click", hold);
at("link").addEventListener("click", () => copy(location.href));
at("yaml").addEventListener("click", () => save("gpu.yaml", "machine.yaml"));
at("report").addEventListener("click", () => save("report.html", "report.html"));
for (const id of ["command", "cell"]) {
  at(id).querySelector("button").addEventListener("click", () => copy(at(id).querySelector("pre").textContent));
}
TABS.forEach((button, place) => {
  button.addEventListener("click", () => select(button.dataset.tab));
  button.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(place + step + TABS.length) % TABS.length];
    next.focus();
    select(next.dataset.tab);
  });
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showPlots(drawn));
tab = recall() || tab;
at("gpu").value = machine.base;
select(tab);
