// A click on a heading sorts its table; without scripts the tables are as readable.
"use strict";
const number = (text) => {
  const found = text.replace(/,/g, "").replace("\u2212", "-").match(/^[+-]?\d+(\.\d+)?/);
  return found ? Number(found[0]) : null;
};
const compare = (one, other, numeric) => {
  // A name such as 16b-bf16 begins with digits as well.
  const [a, b] = numeric ? [number(one), number(other)] : [null, null];
  if (a !== null && b !== null) return a - b;
  return one.localeCompare(other, "en", { numeric: true });
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent.trim();
      const isKnown = (row) => text(row) !== "-";
      const rows = [...body.rows];
      const numeric = heading.classList.contains("r");
      const known = rows.filter(isKnown).sort((a, b) => compare(text(a), text(b), numeric));
      // What is not known stays at the end either way.
      body.append(...(descending ? known.reverse() : known), ...rows.filter((row) => !isKnown(row)));
    });
  });
}

// The charts of lines: SVG in the size that there is, drawn again when that changes. Colours are
// the style sheet's, so that light and dark need no second drawing.
const charts = JSON.parse(document.getElementById("charts").textContent);

const add = (parent, tag, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
};

// Round numbers from low to high, at most `most` of them.
const ticks = (low, high, most) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => (high - low) / one <= most);
  const first = Math.ceil(low / step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => {
    const value = (first + index) * step;
    return [value, value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })];
  });
};

const draw = (box, chart) => {
  const [width, height] = [box.clientWidth, box.clientWidth < 500 ? 240 : 300];
  const last = Math.max(...chart.lines.flatMap((line) => line.x));
  const first = Math.min(...chart.lines.flatMap((line) => line.x), last - 1);
  const rows = ticks(chart.low, chart.high, 6);
  const left = 12 + 7 * Math.max(...rows.map(([, text]) => text.length));
  const [right, top, bottom] = [width - 16, 22, height - 40];
  const across = (x) => left + ((x - first) / (last - first)) * (right - left);
  const down = (y) => bottom - ((y - chart.low) / (chart.high - chart.low)) * (bottom - top);
  const within = (y) => Math.min(Math.max(y, chart.low), chart.high);

  const legend = document.createElement("div");
  legend.className = "legend";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ width, height, role: "img", "aria-label": chart.title })) {
    svg.setAttribute(name, value);
  }
  add(svg, "text", { x: 0, y: 12 }, chart.unit);
  if (chart.band) {
    const size = { width: right - left, height: down(-chart.band) - down(chart.band) };
    add(svg, "rect", { class: "band", x: left, y: down(chart.band), ...size });
  }
  for (const [value, text] of rows) {
    add(svg, "line", { class: value === 0 ? "zero" : "grid", x1: left, x2: right, y1: down(value), y2: down(value) });
    add(svg, "text", { x: left - 6, y: down(value) + 4, "text-anchor": "end" }, text);
  }
  for (const [value, text] of ticks(first, last, width < 500 ? 4 : 8)) {
    const anchor = across(value) > right - 16 ? "end" : across(value) < left + 8 ? "start" : "middle";
    add(svg, "text", { x: across(value), y: bottom + 18, "text-anchor": anchor }, text);
  }
  add(svg, "text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, "step");
  const values = chart.lines.map((line) => {
    const kind = `${line.is_pale ? " pale" : ""}${line.is_dashed ? " dashed" : ""}`;
    for (const x of line.rules) {
      add(svg, "line", { class: `rule s${line.colour}`, x1: across(x), x2: across(x), y1: top, y2: bottom });
    }
    const points = line.x.map((x, index) => `${across(x).toFixed(1)},${down(within(line.y[index])).toFixed(1)}`);
    add(svg, "polyline", { class: `line s${line.colour}${kind}`, points: points.join(" ") });
    if (points.length === 1) line.marks.push([line.x[0], line.y[0]]);
    for (const [x, y] of line.marks) {
      const [at, from] = [across(x), Math.max(down(within(y)), top + 4)];
      add(svg, "path", { class: `mark f${line.colour}`, d: `M${at - 4} ${from + 4}h8l-4 -8z` });
    }
    const item = legend.appendChild(document.createElement("span"));
    item.className = `t${line.colour}${line.is_pale ? " pale" : ""}`;
    item.textContent = line.label;
    return item.appendChild(document.createElement("b"));
  });
  // The legend shows the values at the pointer's step.
  const cursor = add(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  svg.addEventListener("pointermove", (event) => {
    const x = first + ((event.offsetX - left) / (right - left)) * (last - first);
    chart.lines.forEach((line, index) => {
      const after = line.x.findIndex((one) => one >= x);
      values[index].textContent = after < 0 ? "" : ` ${Number(line.y[after].toPrecision(5))}`;
    });
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, Math.min(Math.max(event.offsetX, left), right));
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    values.forEach((value) => { value.textContent = ""; });
    cursor.setAttribute("visibility", "hidden");
  });
  box.replaceChildren(legend, svg);
};

for (const chart of charts.filter((one) => one.lines.length)) {
  const box = document.querySelector(`#figure-${chart.name} .chart`);
  let drawn = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== drawn) draw(box, chart);
    drawn = box.clientWidth;
  }).observe(box);
}
