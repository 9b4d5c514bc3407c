"use strict";
// Colours are custom properties of the page's style, so that a dark page has dark pictures.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function coloured(value) {
  if (typeof value === "string") return value.replace(/^var\((--[\w-]+)\)$/, (_, name) => colour(name));
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, coloured(part)]));
}
const BASE = {
  font: { family: "system-ui, sans-serif", size: 13, color: "var(--ink)" },
  margin: { l: 60, r: 16, t: 30, b: 48 }, paper_bgcolor: "var(--panel)", plot_bgcolor: "var(--panel)", hovermode: "closest",
  colorway: [0, 1, 2, 3, 4, 5, 6, 7].map((at) => `var(--c${at})`),
  legend: { orientation: "h", yanchor: "bottom", y: 1.01, x: 0 },
  modebar: { color: "var(--soft)", activecolor: "var(--ink)", bgcolor: "rgba(0, 0, 0, 0)" },
};
const AXIS = { automargin: true, gridcolor: "var(--grid)", zerolinecolor: "var(--axis)", linecolor: "var(--axis)" };
function layoutOf(layout) {
  const full = { ...BASE, ...layout };
  for (const name of ["xaxis", "yaxis", "xaxis2", "yaxis2"]) {
    if (layout[name] || !name.endsWith("2")) full[name] = { ...AXIS, ...layout[name] };
  }
  return coloured(full);
}
const NARROW = 600;
const taller = (data, height) => (data.length > 1 ? height + 22 * data.length : height);  // room for the legend
function narrowed(data, layout) {
  if (window.innerWidth > NARROW) return layout;
  const names = data.flatMap((trace) => (trace.orientation === "h" ? trace.y : []));
  const below = { orientation: "h", yref: "container", yanchor: "bottom", y: 0, x: 0, font: { size: 11 } };
  layout = { ...layout, legend: { ...layout.legend, ...below }, ...(layout.height && { height: taller(data, layout.height) }) };
  if (!names.length) return layout;
  const short = names.map((name) => (name.length > 22 ? `${name.slice(0, 21)}\u2026` : name));
  return { ...layout, yaxis: { ...layout.yaxis, tickvals: names, ticktext: short, tickfont: { size: 10 } } };
}
function drawPlot(place, plot) {
  if (window.innerWidth <= NARROW && !place.dataset.taller) {
    place.dataset.taller = place.style.minHeight = `${taller(plot.data, place.clientHeight)}px`;
  }
  return Plotly.react(place, coloured(plot.data), layoutOf(narrowed(plot.data, plot.layout)), { displaylogo: false, responsive: true,
    displayModeBar: place.clientWidth > NARROW ? "hover" : false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}
