// Tables that sort, filter and open, and the comparison of chosen runs. Without scripts the tables stand as they are.
"use strict";

const UNITS = { k: 1e3, K: 1e3, M: 1e6, B: 1e9, T: 1e12, s: 1, min: 60, h: 3600 };

// What a cell is sorted by: its number, unit and all, else its first line.
function sortKey(cell) {
  const text = cell.firstChild ? [...cell.childNodes].filter((n) => n.nodeName !== "SMALL" && n.nodeName !== "BUTTON" && n.nodeName !== "INPUT").map((n) => n.textContent).join("").trim() : "";
  const [, digits, unit] = text.match(/^([+-]?[\d,]*\.?\d+)\s*(min|[kKMBTsh])?/) ?? [];
  const named = digits === undefined || /^\d{4}-/.test(text) || cell.tagName === "TH";
  return named ? (text === "–" ? "" : text) : parseFloat(digits.replaceAll(",", "")) * (UNITS[unit] ?? 1);
}

function compared(a, b, direction) {
  if ((a === "") !== (b === "")) return a === "" ? 1 : -1; // what is missing stands last, whatever the direction
  return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

const FIRST = 50; // rows of a table that are laid out at once
const whenIdle = window.requestIdleCallback ?? setTimeout;

// The first visible rows are laid out now, the others as many at a time while the browser is idle. Until then they are
// in the document, and on paper (style.css).
function layOut(table) {
  const rows = [...table.tBodies].flatMap((body) => [...body.rows]).filter((row) => !row.hidden);
  rows.forEach((row, place) => row.classList.toggle("later", place >= FIRST));
  const waiting = (table.waiting = rows.slice(FIRST));
  const next = () => {
    if (table.waiting !== waiting || !waiting.length) return; // sorted or filtered once more, or done
    waiting.splice(0, FIRST).forEach((row) => row.classList.remove("later"));
    whenIdle(next);
  };
  whenIdle(next);
}

// Rows change places within their group only: what is not ranked never stands among what is.
function sortTable(table, column, direction) {
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.matches(".group, .detail"));
    const keyed = rows.map((row) => [row, sortKey(row.cells[column])]);
    keyed.sort(([, a], [, b]) => compared(a, b, direction));
    body.append(...keyed.flatMap(([row]) => (row.nextElementSibling?.matches(".detail") ? [row, row.nextElementSibling] : [row])));
  }
  layOut(table);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element("button", { type: "button" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.classList.contains("n") ? "descending" : "ascending", other = { ascending: "descending", descending: "ascending" };
      const order = other[head.getAttribute("aria-sort")] ?? first;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      sortTable(table, column, order === "ascending" ? 1 : -1);
    });
  });
}

// The rows of all tables, each with the runs that it is about: a recipe's row has several.
const rowsOf = () => [...document.querySelectorAll("table.runs [data-runs]")].map((cell) => (
  { row: cell.parentElement, link: cell.querySelector("a"), runs: cell.dataset.runs.split(" ") }
));

function makeFilters(rows, facts, changed) {
  const ask = { name: (run, value) => run.name.toLowerCase().includes(value.toLowerCase()), since: (run, value) => run.date >= value };
  const form = element("form", { class: "controls filters", role: "search", "aria-label": "Filter runs" });
  form.append(element("label", {}, "Name ", element("input", { type: "search", name: "name", size: 14 })));
  for (const facet of ["division", "track", "device"]) {
    const values = [...new Set(Object.values(facts).map((run) => run[facet]))].filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    if (values.length < 2) continue;
    const options = [element("option", { value: "" }, "all"), ...values.map((value) => element("option", { value }, value))];
    form.append(element("label", {}, facet[0].toUpperCase() + facet.slice(1) + " ", element("select", { name: facet }, ...options)));
    ask[facet] = (run, value) => run[facet] === value;
  }
  form.append(element("label", {}, "Since ", element("input", { type: "date", name: "since" })));
  const count = element("output", { "aria-live": "polite" });
  form.append(element("button", { type: "reset" }, "All runs"), count);
  const apply = () => {
    const asked = [...new FormData(form)].filter(([, value]) => value);
    for (const run of Object.values(facts)) run.visible = asked.every(([name, value]) => ask[name](run, value));
    for (const { row, runs } of rows) {
      row.hidden = !runs.some((id) => facts[id].visible);
      if (row.nextElementSibling?.matches(".detail")) row.nextElementSibling.hidden = row.hidden;
    }
    const visible = Object.values(facts).filter((run) => run.visible).length;
    document.querySelectorAll("table.runs").forEach(layOut);
    count.textContent = `${visible} of ${Object.keys(facts).length} runs`;
    changed();
  };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.querySelector("h1 + p").after(form);
  apply();
}

async function toggle({ row, runs, button }, facts, open) {
  if (open === (button.getAttribute("aria-expanded") === "true")) return;
  button.setAttribute("aria-expanded", open);
  row.classList.remove("later");
  if (!open) return row.nextElementSibling.remove();
  const panel = element("div", { class: "panel" }), cell = element("td", { colspan: row.cells.length }, panel);
  row.after(element("tr", { class: "detail" }, cell));
  const { runs: known } = await details();
  for (const id of runs) {
    const part = element("section", { "aria-label": facts[id].name });
    part.innerHTML = known[id].html; // made from our own templates, which escape what records say
    if (runs.length > 1) part.prepend(element("h4", {}, facts[id].name));
    panel.append(part);
  }
  await drawCurves(panel, facts);
}

function makeExpandable(entry, facts) {
  entry.button = element("button", { type: "button", class: "more", "aria-expanded": "false", "aria-label": `Details of ${entry.link.textContent}` });
  entry.link.before(entry.button);
  entry.button.addEventListener("click", () => toggle(entry, facts, entry.button.getAttribute("aria-expanded") !== "true"));
}

// The settings in which the chosen runs differ, a column for each run.
function differences(place, chosen, found) {
  const value = (run, path) => (path in run.settings ? run.settings[path] ?? "–" : found.settings[path]);
  const paths = Object.keys(found.settings).filter((path) => new Set(chosen.map((run) => value(run, path))).size > 1);
  const head = element("tr", {}, ...["Setting", ...chosen.map((run) => run.name)].map((name) => element("th", { scope: "col" }, name)));
  const lines = paths.map((path) => element("tr", {}, element("th", { scope: "row" }, path), ...chosen.map((run) => element("td", {}, value(run, path)))));
  const table = element("table", { class: "differences" }, element("thead", {}, head), element("tbody", {}, ...lines));
  const words = chosen.length < 2 ? "Choose two runs or more to see where their configurations differ." : `${paths.length} of ${Object.keys(found.settings).length} settings differ.`;
  place.replaceChildren(element("p", {}, words), ...(paths.length ? [element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Settings that differ" }, table)] : []));
}

const MOST = 8; // runs that can be told apart in one plot

async function makeComparison(rows, facts) {
  const place = document.getElementById("compare");
  if (!place || Object.keys(facts).length < 2) return;
  const found = await details(), picked = new Set([...new Set(rows.flatMap(({ runs }) => runs))].slice(0, 3)), boxes = [];
  const plot = element("div", { class: "curves" }), table = element("div");
  place.hidden = false;
  place.append(plot, table);
  const chosen = () => [...picked].map((id) => ({ name: facts[id].name, ...found.runs[id] }));
  const redraw = curvePanel(plot, chosen());
  const show = () => {
    for (const { box, runs } of boxes) [box.checked, box.disabled] = [runs.every((id) => picked.has(id)), picked.size >= MOST && !runs.some((id) => picked.has(id))];
    redraw(chosen());
    differences(table, chosen(), found);
  };
  for (const { button, link, runs } of rows) {
    const box = element("input", { type: "checkbox", "aria-label": `Compare ${link.textContent}`, title: "Compare" });
    box.addEventListener("change", () => { runs.forEach((id) => (box.checked ? picked.add(id) : picked.delete(id))); show(); });
    button.before(box);
    boxes.push({ box, runs });
  }
  show();
}

function reached(state) {
  document.documentElement.dataset.ready = state;
  performance.mark(state);
}

async function start() {
  const tables = document.querySelectorAll("table.runs"), rows = rowsOf(), redraw = [];
  tables.forEach(layOut);
  reached("laid-out");
  const facts = await unpack("facts");
  tables.forEach(makeSortable);
  rows.forEach((entry) => makeExpandable(entry, facts));
  const open = (id) => {
    const entry = rows.find(({ runs }) => runs.includes(id));
    if (entry) toggle(entry, facts, true).then(() => entry.row.scrollIntoView({ block: "start" }));
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#run-']");
    if (link) { event.preventDefault(); open(decodeURIComponent(link.hash.slice(1))); }
  });
  if (rows.length) makeFilters(rows, facts, () => redraw.forEach((one) => one()));
  document.querySelectorAll(".cost[data-suite]").forEach((place) => redraw.push(costPanel(place, facts, open)));
  reached("usable");
  await drawCurves(document, facts);
  await makeComparison(rows, facts);
  reached("compared");
  if (location.hash) open(decodeURIComponent(location.hash.slice(1)));
}

start();
