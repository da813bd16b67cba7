// The table of a suite: views, sorting within groups, filters, rows that open.
"use strict";

const DURATION = (seconds) => (seconds < 120 ? `${seconds.toFixed(0)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`);
const FORMS = {
  text: (value) => (typeof value === "string" && /^[0-9a-f]{40,}$/.test(value) ? value.slice(0, 12) : String(value)),
  date: (value) => value.slice(0, 10), compact: compactNumber, nats: (value) => value.toFixed(3), score: (value) => value.toFixed(1), percent: (value) => `${(100 * value).toFixed(1)}%`,
  duration: DURATION, bytes: (value) => `${(value / 1e9).toFixed(2)} GB`,
};
const NAMED = ["place", "model", "division"];

// Columns of a view: key, title, and whether it holds numbers. Those without a value are left out.
function columnsOf(board, overview, view) {
  const facts = overview.facts.filter(([, , of]) => of === view).map(([key, title]) => [key, title, "fact"]);
  const named = board.columns.filter(([name, , kind]) => name === "place" || name === "model" || (view === "measures" && kind === "headline" && name !== "division"));
  const all = view === "scores" ? board.columns : [...named, ...facts];
  return all.filter(([key, , kind]) => key === "model" || board.rows.some((row) => (kind === "fact" ? factOf(row, overview, key) : row[key]) != null && row[key] !== ""));
}

const factOf = (row, overview, key) => overview.runs[row.runs[0]]?.facts[key];

// What a cell is sorted by.
function sortKey(row, overview, [key, , kind]) {
  const value = kind === "fact" ? factOf(row, overview, key) : row[key];
  if (key === "place") return parseInt(value) || "";
  return Array.isArray(value) ? value[0] ?? "" : value ?? "";
}

function compared(a, b, direction) {
  if ((a === "") !== (b === "")) return a === "" ? 1 : -1; // what is missing stands last, whatever the direction
  return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

function scoreCell(key, value, best) {
  const [score, spread, mark] = value ?? [];
  if (score == null) return element("td", { class: "n" }, "–");
  const words = (key === "gain" && score > 0 ? "+" : "") + score.toFixed(1) + mark;
  return element("td", { class: best ? "n best" : "n" }, words, ...(spread == null ? [] : [element("small", {}, `±${spread.toFixed(1)}`)]));
}

// The table of one board. `page` has the overview, the state and what a row does when it is opened or chosen.
class RunTable {
  constructor(board, page) {
    Object.assign(this, { board, page, table: element("table", { class: "runs" }), opened: new Map() });
    this.place = scrollable(board.title, this.table);
  }

  draw() {
    const { overview, state } = this.page;
    this.columns = columnsOf(this.board, overview, this.board.unscored && state.view === "scores" ? "training" : state.view);
    const sorted = this.columns.find(([key]) => key === state.sort);
    const groups = new Map();
    for (const row of this.board.rows) {
      if (!this.page.visible(row) || (state.view !== "scores" && !row.runs.length)) continue;
      groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
    }
    const bodies = [...groups].map(([title, rows]) => {
      if (sorted) {
        const keys = new Map(rows.map((row) => [row, sortKey(row, overview, sorted)]));
        rows.sort((a, b) => compared(keys.get(a), keys.get(b), state.descending ? -1 : 1));
      }
      return this.group(title, rows);
    });
    this.table.replaceChildren(element("thead", {}, element("tr", {}, ...this.columns.map((column) => this.head(column)))), ...bodies);
    this.place.hidden = !bodies.length;
  }

  head([key, title]) {
    const { state } = this.page, button = element("button", { type: "button" }, title);
    const head = element("th", { scope: "col", class: NAMED.includes(key) ? key : "n" }, button);
    if (state.sort === key) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    button.addEventListener("click", () => {
      state.descending = state.sort === key ? !state.descending : !NAMED.includes(key);
      state.sort = key;
      this.page.update();
      [...this.table.tHead.rows[0].cells][this.columns.findIndex(([name]) => name === key)].firstChild.focus();
    });
    return head;
  }

  group(title, rows) {
    const body = element("tbody", rows.every((row) => row.runs.length) ? {} : { class: "faint" });
    if (title) body.append(element("tr", { class: "group" }, element("th", { colspan: this.columns.length, scope: "rowgroup" }, element("span", {}, title))));
    const best = new Map(this.columns.map(([key]) => [key, rows.length > 1 ? Math.max(...rows.map((row) => (Array.isArray(row[key]) ? row[key][0] ?? -Infinity : -Infinity))) : Infinity]));
    for (const row of rows) {
      body.append(element("tr", {}, ...this.columns.map((column) => this.cell(row, column, best))));
      const panel = this.opened.get(row);
      if (panel) body.append(this.panelRow(panel));
    }
    return body;
  }

  cell(row, [key, , kind], best) {
    if (kind === "fact") {
      const value = factOf(row, this.page.overview, key), form = FORMS[this.page.forms[key]];
      return element("td", { class: "n" }, value == null ? "–" : form(value));
    }
    if (key === "model") return this.nameCell(row);
    if (key === "division") return element("td", { class: `division ${row.division.split(",")[0]}` }, row.division);
    if (key === "place") return element("td", { class: "place" }, row.place);
    return scoreCell(key, row[key], row[key]?.[0] === best.get(key));
  }

  nameCell(row) {
    const detail = row.detail ? [element("small", {}, row.detail)] : [];
    if (!row.runs.length) return element("th", { scope: "row", class: "model" }, row.model, ...detail);
    const { state } = this.page;
    const box = element("input", { type: "checkbox", "aria-label": `Compare ${row.model}`, title: "Compare" });
    box.checked = row.runs.every((id) => state.runs.includes(id));
    box.addEventListener("change", () => this.page.choose(row.runs, box.checked));
    const more = element("button", { type: "button", class: "more", "aria-expanded": this.opened.has(row) }, row.model);
    more.addEventListener("click", () => this.toggle(row));
    return element("th", { scope: "row", class: "model" }, box, more, ...detail);
  }

  panelRow(panel) {
    return element("tr", { class: "detail" }, element("td", { colspan: this.columns.length }, panel));
  }

  async toggle(row, open = !this.opened.has(row)) {
    if (open === this.opened.has(row)) return;
    if (!open) this.opened.delete(row);
    else {
      const panel = element("div", { class: "panel" }), { runs } = await details();
      this.opened.set(row, panel);
      for (const id of row.runs) panel.append(runSection(this.page.overview.runs[id].name, runs[id], row.runs.length > 1));
    }
    this.page.update();
  }
}

// Report of a run, and its curves.
function runSection(name, run, titled = false) {
  const section = element("section", { "aria-label": name }, ...(titled ? [element("h4", {}, name)] : []), ...render(run.blocks));
  if (run.curve.train.step.length + run.curve.validation.step.length) {
    const place = element("div", { class: "curves" });
    const show = curvePanel(place, { axis: "tokens", measure: "loss", smooth: 0 });
    section.insertBefore(place, section.querySelector(":scope > details:last-of-type")?.previousSibling ?? null);
    requestAnimationFrame(() => show([{ name, curve: run.curve }])); // when the place has its width
  }
  return section;
}
