"use strict";
const BASE = {
  font: { family: "system-ui, sans-serif", size: 13, color: "#1c2330" },
  margin: { l: 60, r: 16, t: 30, b: 48 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
  colorway: ["#2a5db0", "#d9822b", "#2e8b57", "#b03a5b", "#6f5bb5", "#4d9db4", "#8a6d3b", "#7a8291"],
  legend: { orientation: "h", yanchor: "bottom", y: 1.01, x: 0 },
};
const AXIS = { automargin: true, gridcolor: "#e8ebf0", zerolinecolor: "#9aa3b2", linecolor: "#9aa3b2" };
function layoutOf(layout) {
  const full = { ...BASE, ...layout };
  for (const name of ["xaxis", "yaxis", "xaxis2", "yaxis2"]) {
    if (layout[name] || !name.endsWith("2")) full[name] = { ...AXIS, ...layout[name] };
  }
  return full;
}
function drawPlot(place, plot) {
  return Plotly.react(place, plot.data, layoutOf(plot.layout), { displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}
async function drawAll() {
  const places = [...document.querySelectorAll("figure .plot")];
  if (!places.length) return;
  try {
    await unpack("plotly");
  } catch (error) {
    places.forEach((place) => { place.textContent = "This browser cannot draw the picture; its numbers are below."; });
    return;
  }
  const plots = JSON.parse(document.getElementById("plots").textContent);
  await Promise.all(places.map((place, at) => drawPlot(place, plots[at])));
  window.addEventListener("beforeprint", () => places.forEach((place) => Plotly.Plots.resize(place)));
}
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const value = row.cells[at].dataset.value;
    return value === undefined ? row.cells[at].textContent : Number(value);
  };
  heads.forEach((head, at) => {
    const sort = () => {
      const falling = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
        : typeof a === typeof b ? String(a).localeCompare(String(b)) : typeof a === "number" ? 1 : -1);
      const rows = [...table.tBodies[0].rows].sort((a, b) => order(key(a, at), key(b, at)));
      table.tBodies[0].append(...(falling ? rows.reverse() : rows));
    };
    head.tabIndex = 0;
    head.title = "Sort";
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
document.querySelectorAll(".tables table").forEach(sortable);
document.documentElement.dataset.ready = "no";
drawAll().then(() => { document.documentElement.dataset.ready = "yes"; });
