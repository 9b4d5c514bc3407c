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
  return Plotly.react(place, plot.data, layoutOf(narrowed(plot.data, plot.layout)), { displaylogo: false, responsive: true,
    displayModeBar: window.innerWidth > NARROW ? "hover" : false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}
