const START = JSON.parse(document.getElementById("start").textContent);
const STATUS = document.getElementById("status");
const machines = [];
const COUNTS = ["gpus", "tensor", "pipeline", "context", "zero", "micro_batch_size"];
const MAIN = document.querySelector("main");
let shown = 0, busy = false, again = false, running = null, last = "";

function fill(select, names, chosen, empty) {
  select.replaceChildren(...names.map((name) => new Option(name || empty, name)));
  select.value = chosen;
}
function say(text, error) {
  STATUS.textContent = text;
  STATUS.className = error ? "error" : "";
}
function workload() {
  const form = new FormData(document.getElementById("workload"));
  const length = form.get("sequence_length");
  return { model: form.get("model"), mode: form.get("mode"), batch_size: Number(form.get("batch_size")),
    sequence_length: length ? Number(length) : null, dtype: form.get("dtype"), recompute: form.get("recompute"),
    ...Object.fromEntries(COUNTS.map((name) => [name, Number(form.get(name))])) };
}
function asked(list) {
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
function stale() {  // numbers on the page are of what was asked before
  const now = named(machines);
  MAIN.classList.add("stale");
  if (now === last) return;
  MAIN.classList.add("renamed");  // and stand under a name that is not theirs
  say(`forecasting ${now}`);
  if (running) running.abort();  // its answer is of the name before
}
function failed(error) {
  MAIN.classList.remove("stale", "renamed");
  last = "";
  for (const { place } of machines)
    place.querySelectorAll(".cards, .notes").forEach((part) => part.replaceChildren());
  document.getElementById("plots").replaceChildren();
  say(error.message, true);
}
async function save(path, machine, name) {
  try {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await (await post(path, asked([machine]))).blob());
    link.download = name;
    link.click();
  } catch (error) { say(error.message, true); }
}
function cards(place, list) {
  place.replaceChildren(...list.map(([name, value, detail]) => {
    const card = document.createElement("div");
    card.className = "card";
    for (const [kind, text] of [["name", name], ["value", value], ["detail", detail]]) {
      const line = document.createElement("div");
      line.className = kind;
      line.textContent = text;
      card.append(line);
    }
    return card;
  }));
}
function showFigures(machine, figures) {
  for (const slider of machine.sliders) {
    const value = figures[slider.name];
    if (value === undefined) continue;
    slider.output.textContent = Number((value / slider.scale).toPrecision(4)).toLocaleString("en");
    slider.row.classList.toggle("moved", Math.abs(value / slider.value - 1) > 1e-6);
    if (!(slider.name in machine.figures)) slider.input.value = Math.log(value / slider.value);
  }
}
function showPlots(plots) {
  const place = document.getElementById("plots");
  while (place.children.length < plots.length) {
    const figure = document.createElement("figure");
    figure.innerHTML = "<figcaption><h2></h2></figcaption><div class='plot'></div>";
    place.append(figure);
  }
  while (place.children.length > plots.length) place.lastChild.remove();
  return Promise.all(plots.map((plot, at) => {
    place.children[at].querySelector("h2").textContent = plot.title;
    return drawPlot(place.children[at].querySelector(".plot"), plot);
  }));
}
async function update() {
  stale();
  if (busy) { again = true; return; }
  busy = true;
  do {
    again = false;
    const list = machines.slice(), name = named(list);
    const timer = setTimeout(() => say(`compiling ${name}, once`), 700);
    running = new AbortController();
    try {
      const answer = await (await post("forecast", asked(list), running.signal)).json();
      if (name !== named(machines)) continue;  // its answer is of the name before
      const field = document.getElementById("workload").elements.sequence_length;
      field.placeholder = answer.sequence_length ? answer.sequence_length : "";
      list.forEach((machine, at) => {
        const found = answer.machines[at];
        cards(machine.place.querySelector(".cards"), found.cards);
        showFigures(machine, found.figures);
        machine.place.querySelector(".notes").replaceChildren(...found.notes.map((note) => {
          const item = document.createElement("li");
          item.textContent = note;
          return item;
        }));
      });
      last = name;
      say(`checkpoint ${answer.machines[0].checkpoint}`);
      document.documentElement.dataset.shown = ++shown;
      await new Promise((done) => setTimeout(done, 0));
      if (!again) { await showPlots(answer.plots); }
      if (!again) MAIN.classList.remove("stale", "renamed");
    } catch (error) { if (error.name !== "AbortError") failed(error); } finally { clearTimeout(timer); }
  } while (again);
  busy = false;
}
async function choose(machine, base) {
  Object.assign(machine, { base, figures: {} });
  stale();
  let list;
  try {
    list = await (await ask(`sliders?gpu=${encodeURIComponent(base)}&gpus=${workload().gpus}`)).json();
  } catch (error) { failed(error); return; }
  if (machine.base !== base) return;
  machine.sliders = list.map((slider) => {
    const row = document.createElement("label");
    row.className = "slider";
    const [name, output] = [document.createElement("span"), document.createElement("output")];
    const input = Object.assign(document.createElement("input"), { type: "range", step: 0.005,
      min: -Math.log(slider.reach), max: Math.log(slider.reach), value: 0, name: slider.name });
    name.textContent = name.title = slider.label;
    input.addEventListener("input", () => {
      const value = slider.value * Math.exp(Number(input.value));
      machine.figures[slider.name] = slider.name === "num_sms" ? Math.max(1, Math.round(value)) : value;
      update();
    });
    row.append(name, input, output);
    return { ...slider, row, input, output };
  });
  machine.place.querySelector(".sliders").replaceChildren(...machine.sliders.map((slider) => slider.row));
  await update();
}
function addMachine(base) {
  const place = document.getElementById("machine").content.cloneNode(true).firstElementChild;
  const machine = { place, base, figures: {}, sliders: [] };
  fill(place.querySelector(".gpu"), START.gpus.includes(base) ? START.gpus : [base, ...START.gpus], base);
  place.querySelector(".gpu").addEventListener("change", (event) => choose(machine, event.target.value));
  place.querySelector(".reset").addEventListener("click", () => choose(machine, machine.base));
  place.querySelector(".yaml").addEventListener("click", () => save("gpu.yaml", machine, "gpu.yaml"));
  place.querySelector(".report").addEventListener("click", () => save("report.html", machine, "report.html"));
  document.getElementById("machines").append(place);
  machines.push(machine);
  return choose(machine, base);
}
const form = document.getElementById("workload");
fill(form.elements.model, START.models.includes(START.first.model) ? START.models
  : [START.first.model, ...START.models], START.first.model);
fill(form.elements.mode, START.modes, START.first.mode || "inference");
fill(form.elements.dtype, START.dtypes, START.first.dtype || "", "the model's own");
form.addEventListener("submit", (event) => event.preventDefault());
fill(form.elements.recompute, START.recompute, "none");
async function changed(event) {
  if (event.target.id === "two") return;
  if (event.target.name !== "gpus") { update(); return; }
  const gpus = Number(form.elements.gpus.value), many = gpus > 1, layout = document.getElementById("layout");
  if (many) {  // a job trains, and each replica has something to do
    if (layout.hidden) form.elements.mode.value = "training";
    if (Number(form.elements.batch_size.value) % gpus) form.elements.batch_size.value = gpus;
  }
  const switched = layout.hidden === many;
  layout.hidden = !many;
  if (!switched) { update(); return; }
  for (const machine of machines) await choose(machine, machine.base);
}
form.addEventListener("change", changed);
document.getElementById("two").addEventListener("change", (event) => {
  if (event.target.checked) { addMachine(machines[0].base); return; }
  machines.pop().place.remove();
  update();
});
addMachine(START.first.gpu);
