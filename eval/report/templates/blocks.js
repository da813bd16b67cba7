// Elements of the page, and the parts of a report (eval/report/blocks.py) as HTML.
"use strict";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at); // four times as fast as Uint8Array.from
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}

let unpacked; // what is shown on demand
const details = () => (unpacked ??= unpack("details"));

// A labelled select. Options are values, or pairs of a value and its words.
function chooser(label, options, value, changed) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const select = element("select", {}, ...pairs.map(([key, words]) => element("option", { value: key }, words)));
  select.value = value;
  select.addEventListener("change", () => changed(select.value));
  return element("label", {}, label + " ", select);
}

const scrollable = (label, table) => element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, table);

function folded(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

const RENDER = {
  Heading: (words, level) => element(`h${level}`, {}, words),
  Text: (words) => element("p", {}, words),
  Notes: (items) => element("ul", { class: "notes" }, ...items.map((item) => element("li", {}, item))),
  Links: (targets) => {
    const links = Object.entries(targets).map(([title, href]) => element("a", { href }, title));
    return element("p", { class: "links" }, ...links);
  },
  Details: (title, blocks) => folded(title, ...render(blocks)),
  Table: (columns, rows, left) => {
    const side = (at) => (at >= left ? { class: "n" } : {});
    const head = element("tr", {}, ...columns.map((name, at) => element("th", { scope: "col", ...side(at) }, name)));
    const line = (cells) => element("tr", {}, ...cells.map((cell, at) => (at ? element("td", side(at), cell) : element("th", { scope: "row" }, cell))));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows.map(line)));
    return scrollable(columns.filter(Boolean).join(", "), table);
  },
};
const render = (blocks) => blocks.map(([kind, ...fields]) => RENDER[kind](...fields));
