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
const { cells, charts } = JSON.parse(document.getElementById("charts").textContent);
const COLOURS = 8, MANY = 8;
const controls = document.getElementById("controls");
const axis = document.getElementById("axis"), log = document.getElementById("log");
for (const chart of charts) {
  let before = {};
  chart.lines = chart.lines.map((line) => {
    let step = 0;
    const x = line.x?.map((more) => (step += more)) ?? before.x;
    before = { ...before, is_pale: false, marks: [], rules: [], ...line, x };
    return before;
  });
}

// Of many cells the first ones with a curve are shown; boxes in the table choose others.
const drawable = [...new Set(charts.flatMap((chart) => chart.lines.map((line) => line.cell)))].sort((a, b) => a - b);
const hidden = new Set(cells.length > MANY ? drawable.slice(MANY) : []);

const add = (parent, tag, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
};

// A step's place along the axis: itself, the tokens seen by then, or the seconds since the first.
const along = (cell, step) => {
  const column = { step: 0, tokens: 2, time: 1 }[axis.value], { clock } = cells[cell];
  if (!column || clock.length < 2) return step;
  const found = clock.findIndex((one) => one[0] >= step);
  const after = found < 0 ? clock.length - 1 : Math.max(1, found);
  const [one, other] = [clock[after - 1], clock[after]];
  return one[column] + ((step - one[0]) / (other[0] - one[0])) * (other[column] - one[column]);
};

// Round numbers from low to high, at most `most` of them, each with their distance.
const ticks = (low, high, most, isWhole) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const least = isWhole ? 1 : 0;
  const step = Math.max(least, [1, 2, 5, 10].map((times) => times * power).find((one) => (high - low) / one <= most));
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => [(first + index) * step, step]);
};
const logTicks = (low, high) => {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const times of high / low > 100 ? [1] : [1, 2, 3, 5, 7]) found.push([times * 10 ** power, 10 ** power]);
  }
  const within = found.filter(([value]) => value >= low && value <= high);
  return within.length > 1 ? within : ticks(low, high, 6);
};
const shown = (value, step) => {
  if (value && step < 1e-4) return value.toExponential(1);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
const shownAlong = (value) => {
  if (axis.value === "step") return Math.round(value).toLocaleString("en");
  if (axis.value === "tokens") return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  const pad = (number) => String(Math.floor(number)).padStart(2, "0");
  return `${Math.floor(value / 3600)}:${pad((value / 60) % 60)}:${pad(value % 60)}`;
};

const draw = (box, chart) => {
  const lines = chart.lines.filter((line) => !hidden.has(line.cell));
  const [width, height] = [box.clientWidth, box.clientWidth < 500 ? 240 : 300];
  const xs = lines.map((line) => line.x.map((x) => along(line.cell, x)));
  const last = Math.max(...xs.flat(), 1);
  const first = Math.min(...xs.flat(), last - 1);
  const positive = chart.lines.flatMap((line) => line.y).filter((y) => y > 0);
  const isLog = log.checked && !chart.band && positive.length > 0;
  const low = isLog ? Math.min(...positive) : chart.low;
  const high = isLog ? Math.max(chart.high, low * 1.1) : chart.high;
  const scale = isLog ? Math.log : (y) => y;
  const rows = (isLog ? logTicks(low, high) : ticks(low, high, 6)).map(([value, step]) => [value, shown(value, step)]);
  const left = 12 + 7 * Math.max(...rows.map(([, text]) => text.length));
  const [right, top, bottom] = [width - 16, 22, height - 40];
  const across = (x) => left + ((x - first) / (last - first)) * (right - left);
  const down = (y) => bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (bottom - top);
  const within = (y) => Math.min(Math.max(y, low), high);

  const legend = document.createElement("div");
  legend.className = "legend";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ width, height, role: "img", tabindex: 0, "aria-label": chart.title })) {
    svg.setAttribute(name, value);
  }
  add(svg, "text", { x: 0, y: 12 }, chart.unit);
  const place = add(svg, "text", { x: right, y: 12, "text-anchor": "end" }, "");
  if (chart.band) {
    const size = { width: right - left, height: down(-chart.band) - down(chart.band) };
    add(svg, "rect", { class: "band", x: left, y: down(chart.band), ...size });
  }
  for (const [value, text] of rows) {
    add(svg, "line", { class: value === 0 ? "zero" : "grid", x1: left, x2: right, y1: down(value), y2: down(value) });
    add(svg, "text", { x: left - 6, y: down(value) + 4, "text-anchor": "end" }, text);
  }
  const unit = axis.value === "time" ? [3600, 60, 1].find((one) => last - first > 2 * one) ?? 1 : 1;
  for (const value of ticks(first / unit, last / unit, width < 500 ? 4 : 7, true).map(([count]) => count * unit)) {
    const anchor = across(value) > right - 16 ? "end" : across(value) < left + 8 ? "start" : "middle";
    add(svg, "text", { x: across(value), y: bottom + 18, "text-anchor": anchor }, shownAlong(value));
  }
  const title = axis.value === "time" ? "time since the first step, h:min:s" : axis.value;
  add(svg, "text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, title);

  // Curves that lie on one another take turns, in dashes.
  const paths = lines.map((line, index) => line.y.map((y, at) => [across(xs[index][at]), down(within(y))]));
  const groups = [];
  paths.forEach((path, index) => {
    const isNear = ([x, y], at) => Math.abs(x - path[at][0]) < 2 && Math.abs(y - path[at][1]) < 2;
    const alike = (other) => other.length === path.length && other.filter(isNear).length > 0.8 * path.length;
    const group = groups.find((found) => alike(paths[found[0]]));
    if (group) group.push(index);
    else groups.push([index]);
  });
  lines.forEach((line, index) => {
    const colour = line.cell % COLOURS, group = groups.find((found) => found.includes(index));
    for (const x of line.rules.map((step) => across(along(line.cell, step)))) {
      add(svg, "line", { class: `rule s${colour}`, x1: x, x2: x, y1: top, y2: bottom });
    }
    const kind = `${line.is_pale ? " pale" : ""}${Math.floor(line.cell / COLOURS) % 2 ? " dashed" : ""}`;
    const points = paths[index].map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
    const node = add(svg, "polyline", { class: `line s${colour}${kind}`, points: points.join(" ") });
    if (group.length > 1) {
      node.style.strokeDasharray = `9 ${9 * (group.length - 1)}`;
      node.style.strokeDashoffset = -9 * group.indexOf(index);
    }
    for (const [x, y] of points.length === 1 ? [...line.marks, [line.x[0], line.y[0]]] : line.marks) {
      const [at, from] = [across(along(line.cell, x)), Math.max(down(within(y)), top + 4)];
      add(svg, "path", { class: `mark f${colour}`, d: `M${at - 4} ${from + 4}h8l-4 -8z` });
    }
  });
  const named = chart.lines.filter((line) => cells.length <= MANY || !hidden.has(line.cell));
  const values = named.map((line) => {
    const button = legend.appendChild(document.createElement("button"));
    button.type = "button";
    button.className = `t${line.cell % COLOURS}${line.is_pale ? " pale" : ""}`;
    button.setAttribute("aria-pressed", String(!hidden.has(line.cell)));
    button.textContent = line.label;
    button.addEventListener("click", () => toggle(line.cell));
    return [line, button.appendChild(document.createElement("b"))];
  });
  // The legend shows the values at the pointer, and the chart's corner where that is.
  const cursor = add(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  let at = first;
  const move = (to) => {
    at = Math.min(Math.max(to, first), last);
    const x = axis.value === "step" ? Math.round(at) : at;
    place.textContent = `${axis.value} ${shownAlong(x)}`;
    for (const [line, value] of values) {
      const after = hidden.has(line.cell) ? -1 : xs[lines.indexOf(line)].findIndex((one) => one >= x);
      value.textContent = after < 0 ? "" : ` ${Number(line.y[after].toPrecision(5))}`;
    }
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, across(x));
    cursor.setAttribute("visibility", "visible");
  };
  const clear = () => {
    for (const node of [place, ...values.map(([, value]) => value)]) node.textContent = "";
    cursor.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", (event) => move(first + ((event.offsetX - left) / (right - left)) * (last - first)));
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) move(at); });
  svg.addEventListener("keydown", (event) => {
    const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!turn) return;
    move(at + turn * Math.max((last - first) / 100, axis.value === "step" ? 1 : 0));
    event.preventDefault();
  });
  box.replaceChildren(legend, svg);
};

const figures = charts.map((chart) => [document.querySelector(`#figure-${chart.name} .chart`), chart]);
const drawAll = () => figures.forEach(([box, chart]) => draw(box, chart));
const toggle = (cell) => {
  const figure = document.activeElement.closest("figure");
  const place = figure ? [...figure.querySelectorAll(".legend button")].indexOf(document.activeElement) : -1;
  if (!hidden.delete(cell)) hidden.add(cell);
  drawAll();
  for (const box of document.querySelectorAll(`input[data-cell="${cell}"]`)) box.checked = !hidden.has(cell);
  if (place >= 0) figure.querySelectorAll(".legend button")[place]?.focus();
};
if (charts.length) {
  controls.hidden = false;
  for (const control of [axis, log]) control.addEventListener("change", drawAll);
}
if (cells.length > MANY) {
  const rows = document.getElementById("table-cells").tBodies[0].rows;
  for (const cell of drawable) {
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: !hidden.has(cell), ariaLabel: `draw ${cells[cell].label}` });
    box.dataset.cell = cell;
    box.addEventListener("change", () => toggle(cell));
    rows[cell].cells[0].prepend(box, " ");
  }
}
for (const [box, chart] of figures) {
  let drawn = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== drawn) draw(box, chart);
    drawn = box.clientWidth;
  }).observe(box);
}
