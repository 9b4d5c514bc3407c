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
function narrowed(data, layout) {
  const names = data.flatMap((trace) => (trace.orientation === "h" ? trace.y : []));
  if (window.innerWidth > 600 || !names.length) return layout;
  const short = names.map((name) => (name.length > 22 ? `${name.slice(0, 21)}\u2026` : name));
  return { ...layout, yaxis: { ...layout.yaxis, tickvals: names, ticktext: short, tickfont: { size: 10 } } };
}
function drawPlot(place, plot) {
  return Plotly.react(place, plot.data, layoutOf(narrowed(plot.data, plot.layout)), { displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}
