// The page: what is chosen stands in its address, so a link shows the same again.
"use strict";

const DEFAULTS = {
  view: "scores", sort: "", descending: false, name: "", division: "", track: "", device: "", since: "", runs: [],
  axis: "tokens", measure: "loss", smooth: 0, score: "", cost: "", price: 2, open: "",
};
const MOST = 8; // runs that can be told apart in one plot

// Read the state from the address; what is not there has its default.
function readState() {
  const state = { ...DEFAULTS };
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const usual = DEFAULTS[name];
    if (Array.isArray(usual)) state[name] = text.split(" ").filter(Boolean);
    else if (usual !== undefined) state[name] = typeof usual === "number" ? Number(text) || 0 : typeof usual === "boolean" ? text === "true" : text;
  }
  return state;
}

function writeState(state) {
  const words = (value) => (Array.isArray(value) ? value.join(" ") : String(value));
  const changed = Object.entries(state).filter(([name, value]) => words(value) !== words(DEFAULTS[name]));
  const hash = new URLSearchParams(changed.map(([name, value]) => [name, words(value)])).toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

// Settings in which the chosen runs differ, a column for each run.
function differences(chosen, usual) {
  const value = (run, path) => (path in run.settings ? run.settings[path] ?? "–" : usual[path]);
  const paths = Object.keys(usual).filter((path) => new Set(chosen.map((run) => value(run, path))).size > 1);
  const words = chosen.length < 2 ? "Choose two runs or more to see where their settings differ." : `${paths.length} of ${Object.keys(usual).length} settings differ.`;
  const rows = paths.map((path) => [path, ...chosen.map((run) => value(run, path))]);
  return render([["Text", words], ...(rows.length ? [["Table", ["Setting", ...chosen.map((run) => run.name)], rows, 9]] : [])]);
}

class Page {
  constructor(overview) {
    this.overview = overview;
    this.state = readState();
    this.forms = Object.fromEntries(overview.facts.map(([key, , , form]) => [key, form]));
    this.redraw = [];
    const scored = new Set(overview.boards.flatMap((board) => board.rows.flatMap((row) => row.runs)));
    const others = Object.entries(overview.runs).filter(([id]) => !scored.has(id));
    this.boards = [...overview.boards];
    if (others.length) {
      const rows = others.map(([id, run]) => ({ group: "", place: "", model: run.name, detail: "", division: run.division, runs: [id] }));
      this.boards.push({ title: "Not scored yet", unscored: true, columns: [["model", "Model"]], rows });
    }
    this.tables = this.boards.map((board) => new RunTable(board, this));
    if (!this.state.runs.length) this.state.runs = [...scored].slice(0, 3);
    this.state.runs = this.state.runs.filter((id) => id in overview.runs);
  }

  // Whether a row is of a run that the filters let through.
  visible(row) {
    const { name, since, division, track, device } = this.state;
    const facets = { track, device };
    if (!row.runs.length) return !(name || since || division || track || device);
    return row.runs.some((id) => {
      const run = this.overview.runs[id];
      return `${run.name} ${row.model}`.toLowerCase().includes(name.toLowerCase()) && (!division || run.division === division)
        && (run.facts.created ?? "").slice(0, 10) >= since && Object.entries(facets).every(([key, value]) => !value || run.facts[key] === value);
    });
  }

  update() {
    writeState(this.state);
    this.tables.forEach((table) => table.draw());
    this.redraw.forEach((draw) => draw());
    const rows = this.boards.flatMap((board) => board.rows).filter((row) => row.runs.length);
    if (this.count) this.count.textContent = `${rows.filter((row) => this.visible(row)).length} of ${rows.length} rows`;
  }

  choose(ids, chosen) {
    const others = this.state.runs.filter((id) => !ids.includes(id));
    this.state.runs = chosen ? [...others, ...ids].slice(-MOST) : others;
    this.update();
  }

  async open(id) {
    for (const table of this.tables) {
      const row = table.board.rows.find((row) => row.runs.includes(id));
      if (!row) continue;
      await table.toggle(row, true);
      table.opened.get(row).scrollIntoView({ block: "nearest" });
      return;
    }
  }

  controls() {
    const { state } = this, form = element("form", { class: "controls filters", role: "search", "aria-label": "Filter runs" });
    const known = (of) => this.overview.facts.some(([key, , view]) => view === of && Object.values(this.overview.runs).some(({ facts }) => facts[key] != null));
    const views = [["scores", "Scores"], ["measures", "Measures"], ["training", "Training"], ["recipe", "Recipe"]].filter(([view]) => view === "scores" || known(view));
    for (const [view, title] of views) {
      const button = element("button", { type: "button", class: "view", "aria-pressed": state.view === view }, title);
      button.addEventListener("click", () => {
        state.view = view;
        form.querySelectorAll(".view").forEach((other) => other.setAttribute("aria-pressed", other === button));
        this.update();
      });
      form.append(button);
    }
    const input = (name, label, type) => {
      const field = element("input", { type, name, size: 14, value: state[name] });
      field.addEventListener("input", () => { state[name] = field.value; this.update(); });
      form.append(element("label", {}, label + " ", field));
    };
    input("name", "Name", "search");
    for (const facet of ["division", "track", "device"]) {
      const values = Object.values(this.overview.runs).map((run) => (facet === "division" ? run.division : run.facts[facet]));
      const known = [...new Set(values)].filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      if (known.length < 2) continue;
      const label = chooser(facet[0].toUpperCase() + facet.slice(1), [["", "all"], ...known], state[facet], (value) => { state[facet] = value; this.update(); });
      label.querySelector("select").name = facet;
      form.append(label);
    }
    input("since", "Since", "date");
    const reset = element("button", { type: "button" }, "All runs"), link = element("button", { type: "button" }, "Copy link");
    reset.addEventListener("click", () => {
      for (const name of ["name", "division", "track", "device", "since"]) {
        state[name] = "";
        const field = form.querySelector(`[name=${name}]`);
        if (field) field.value = "";
      }
      this.update();
    });
    link.addEventListener("click", () => navigator.clipboard?.writeText(location.href));
    this.count = element("output", { "aria-live": "polite" });
    form.append(reset, link, this.count);
    form.addEventListener("submit", (event) => event.preventDefault());
    return form;
  }

  async compare() {
    const { state, overview } = this, { settings, runs } = await details();
    const plot = element("div", { class: "curves" }), table = element("div");
    const show = curvePanel(plot, state, () => writeState(state));
    this.redraw.push(() => {
      const chosen = state.runs.map((id) => ({ name: overview.runs[id].name, ...runs[id] }));
      show(chosen);
      table.replaceChildren(...differences(chosen, settings));
    });
    return element("section", { id: "compare" }, element("h2", {}, "Compare runs"),
      element("p", {}, "Runs whose boxes are ticked above: their curves, and where their settings differ."), plot, table);
  }
}

function themeButton() {
  const button = element("button", { type: "button", class: "theme", "aria-label": "Switch between light and dark" }, "◐");
  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
  button.addEventListener("click", () => { document.documentElement.style.colorScheme = isDark() ? "light" : "dark"; });
  return button;
}

function reached(state) {
  document.documentElement.dataset.ready = state;
  performance.mark(state);
}

async function start() {
  const overview = await unpack("overview"), main = document.querySelector("main");
  main.replaceChildren(element("header", {}, element("h1", {}, overview.title), themeButton(), element("p", {}, overview.summary)));
  if (!overview.reference) { // the report of one run
    const [[id, run]] = Object.entries((await details()).runs);
    main.append(runSection(overview.runs[id].name, run));
    return reached("complete");
  }
  const page = new Page(overview);
  page.boards.forEach((board, place) => {
    const cost = element("div", { class: "cost" }), headline = board.headline ? [element("p", { class: "headline" }, board.headline)] : [];
    main.append(element("h2", {}, board.title), ...headline, ...(place ? [] : [page.controls()]), page.tables[place].place);
    if (board.notes) main.append(cost, ...render(board.notes));
  });
  page.update();
  reached("usable");
  page.boards.forEach((board, place) => {
    if (board.unscored) return;
    const redraw = costPanel(main.querySelectorAll(".cost")[place], board, overview, page.state,
      { visible: (row) => page.visible(row), open: (id) => page.open(id), changed: () => writeState(page.state) });
    page.redraw.push(redraw);
  });
  if (Object.keys(overview.runs).length) main.append(await page.compare());
  if (overview.unreadable.length) main.append(element("h2", {}, "Not readable"), ...render([["Table", ["Folder", "Problem"], overview.unreadable, 2]]));
  main.append(element("h2", {}, "Reference"), ...render(overview.reference));
  page.update();
  if (page.state.open) await page.open(page.state.open);
  reached("complete");
}

start();
