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
    const below = document.querySelector(".tables") ? "; its numbers are below" : "";
    places.forEach((place) => { place.textContent = `This browser cannot draw the picture${below}.`; });
    return;
  }
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const draw = () => Promise.all(places.map((place, at) => drawPlot(place, plots[at])));
  await draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const theme = document.documentElement.dataset;
  window.addEventListener("beforeprint", () => { theme.theme = "light"; draw(); });  // paper is white
  window.addEventListener("afterprint", () => { delete theme.theme; draw(); });
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
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
document.documentElement.dataset.ready = "no";
drawAll().then(() => { document.documentElement.dataset.ready = "yes"; });
