"use strict";
// Elements of the page: text, tables that sort, pictures of rows. Every text from the data set is set as text.

const content = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("content");

const add = (parent, tag, text, attributes) => {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  parent.append(element);
  return element;
};
const addName = (parent, text) => add(parent, "bdi", text, {dir: "auto", title: text});
const count = (number) => number.toLocaleString("en");
const plural = (number, singular, many) => `${count(number)} ${number === 1 ? singular : many || singular + "s"}`;
const percent = (share) => share > 0 && share < 0.001 ? "less than 0.1 %" : (100 * share).toFixed(1) + " %";
const short = (number) => {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? number.toExponential(2) : Number(number.toPrecision(4)).toString();
};

// The heading of the page, its notes, and tiles: returns a function that adds a tile with a number and what it means
const addHead = (kind, parent) => {
  document.title = `${content.title} – layertap ${kind}`;
  const title = document.getElementById("title");
  title.textContent = "";
  addName(title, content.title);
  document.getElementById("footer").textContent =
    `Written ${content.written} by layertap ${content.version}. This page loads no other files.`;
  for (const note of content.notes) add(parent, "p", note, {class: "note"});
  const tiles = add(parent, "div", null, {class: "tiles"});
  return (number, text) => {
    const element = add(tiles, "div", null, {class: "tile"});
    add(element, "b", number);
    element.append(text);
  };
};

let sections = 0;
const addSection = (title, id = `section-${++sections}`) => {
  const element = add(main, "section", null, {"aria-labelledby": id});
  add(element, "h2", title, {id});
  add(add(document.getElementById("contents"), "li"), "a", title, {href: `#${id}`});
  return element;
};

const addButton = (parent, text, act, attributes) => {
  const button = add(parent, "button", text, {type: "button", ...attributes});
  button.addEventListener("click", act);
  return button;
};

// An element that scrolls sideways, in a frame that shows an arrow where there is more of it
const addSideways = (parent, tag, attributes) => {
  const frame = add(parent, "div", null, {class: "sideways"});
  const element = add(frame, tag, null, {tabindex: "0", ...attributes});
  const update = () => {
    const rest = element.scrollWidth - element.clientWidth - element.scrollLeft;
    frame.classList.toggle("more", rest > 2);
    frame.classList.toggle("before", element.scrollLeft > 2);
  };
  element.addEventListener("scroll", update, {passive: true});
  const observer = new ResizeObserver(update);
  observer.observe(element);
  new MutationObserver(update).observe(element, {childList: true, subtree: true});
  return element;
};

// Columns of a table: [title, "text" | "number", value of a row to sort by, text to show]
const addTable = (parent, caption, columns, rows) => {
  const scroll = addSideways(parent, "div", {class: "scroll", role: "region", "aria-label": caption});
  const element = add(scroll, "table");
  add(element, "caption", caption);
  const head = add(add(element, "thead"), "tr");
  const body = add(element, "tbody");
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    for (const [, kind, value, shown] of columns) {
      const cell = add(line, "td", null, kind === "number" ? {class: "number"} : {});
      const text = shown ? shown(row) : value(row);
      if (kind === "number") cell.textContent = text ?? "–";
      else addName(cell, text ?? "");
    }
    return [line, row];
  });
  const headings = columns.map(([title, kind, value, shown]) => {
    const longest = Math.max(0, ...rows.map((row) => String((shown ? shown(row) : value(row)) ?? "").length));
    const heading = add(head, "th", null, {scope: "col", "aria-sort": "none", ...(kind === "number" ? {class: "number"} : {})});
    if (kind === "text") heading.style.minWidth = `calc(${Math.min(longest, 30)}ch + 1.2rem)`; // with the padding
    addButton(heading, title, () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => kind === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
      lines.sort(([, left], [, right]) => {
        const [a, b] = [value(left), value(right)];
        const missing = (x) => x === null || x === undefined;
        if (missing(a) || missing(b)) return missing(a) - missing(b); // missing values come last in both directions
        return up ? order(a, b) : order(b, a);
      });
      body.replaceChildren(...lines.map(([line]) => line));
    });
    return heading;
  });
  body.replaceChildren(...lines.map(([line]) => line));
  return element;
};

// Rows of the data set

const rowOf = (number) => content.rows[number] || ["", -1, "", number];
const pathOf = (number) => rowOf(number)[0];
const labelOf = (number) => rowOf(number)[1];
const splitOf = (number) => rowOf(number)[2];
const predictionOf = (number) => rowOf(number).length > 4 ? rowOf(number).slice(4) : null; // label, predicted, probability
const isWrong = (number) => predictionOf(number)[0] !== predictionOf(number)[1];
const className = (label) => label < 0 ? "" : content.classes[label] ? content.classes[label][0] : `class ${label}`;
const byClass = content.alike !== undefined && content.alike.same_class !== undefined; // some images share a class
// Whether two images have the same class; null if one has none, or each is alone in its class
const sameClass = (a, b) => byClass && labelOf(a) >= 0 && labelOf(b) >= 0 ? labelOf(a) === labelOf(b) : null;
const certainty = (probability) => probability === null ? "" : `, ${(100 * probability).toFixed(0)} %`;

// Thumbnails: tiles of sheets

const sheets = content.thumbnails.sheets.map((text) => {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Blob([bytes], {type: "image/webp"});
});
const sheetUrls = sheets.map((blob) => URL.createObjectURL(blob));
const tileOf = (number) => {
  const tile = content.thumbnails.tiles[number];
  if (!tile) return null;
  const {side, columns} = content.thumbnails, [place, width, height] = tile;
  const inSheet = place % (columns * columns);
  return {
    sheet: Math.floor(place / (columns * columns)), x: inSheet % columns * side, y: Math.floor(inSheet / columns) * side,
    width, height, sheetWidth: columns * side,
  };
};

const CARD_PX = 112, STRIP_PX = 100; // sides of pictures in cards, and in strips of eleven; page.css has the same numbers
const addPicture = (parent, number, side = CARD_PX) => {
  const frame = add(parent, "div", null, {class: "picture"});
  const tile = tileOf(number);
  if (!tile) {
    frame.textContent = "no picture";
    return;
  }
  const image = add(frame, "div", null, {class: "tile-image", "data-row": number});
  const scale = side / Math.max(tile.width, tile.height);
  image.style.width = `${tile.width * scale}px`;
  image.style.height = `${tile.height * scale}px`;
  image.style.backgroundImage = `url("${sheetUrls[tile.sheet]}")`;
  image.style.backgroundSize = `${tile.sheetWidth * scale}px auto`;
  image.style.backgroundPosition = `${-tile.x * scale}px ${-tile.y * scale}px`;
};

// The shortest end of a path, from a "/" on, that no other row of the page has
const endsOfPaths = new Map();
for (const [path] of Object.values(content.rows))
  for (let at = path.length; at > 0;) {
    at = path.lastIndexOf("/", at - 1);
    endsOfPaths.set(path.slice(at + 1), (endsOfPaths.get(path.slice(at + 1)) || 0) + 1);
  }
const shortPath = (number) => {
  const path = pathOf(number);
  let at = path.lastIndexOf("/");
  while (at > 0 && endsOfPaths.get(path.slice(at + 1)) > 1) at = path.lastIndexOf("/", at - 1);
  return path.slice(at + 1);
};

// A card: the picture of a row, lines of text, its file name and its class. `mark`: true: right, false: wrong.
const addCard = (parent, number, lines, {kind = "", mark = null, side = CARD_PX, suggested = ""} = {}) => {
  const element = add(parent, "li", null, {class: `card ${kind} ${mark === null ? "" : mark ? "right" : "wrong"}`});
  addPicture(element, number, side);
  for (const line of lines) add(element, "div", line);
  const path = shortPath(number);
  const name = addName(element, path.length > 48 ? "…" + path.slice(-47) : path); // paths differ at their ends
  name.title = pathOf(number);
  name.className = "path";
  if (labelOf(number) >= 0) {
    const line = add(element, "div", null, {class: "class"});
    if (mark !== null) add(line, "span", mark ? "✓ " : "✗ ", {role: "img", "aria-label": mark ? "same class: " : "other class: "});
    addName(line, className(labelOf(number)));
  }
  if (suggested) addName(add(element, "div", "probably ", {class: "predicted"}), suggested);
  return element;
};
const addNeighbours = (parent, number, hits) => {
  const strip = addSideways(parent, "ul", {class: "strip row-strip", "aria-label": `Nearest to ${pathOf(number)}`});
  addCard(strip, number, ["query"], {kind: "query", side: STRIP_PX});
  for (const [hit, text] of hits) addCard(strip, hit, [text], {side: STRIP_PX, mark: sameClass(number, hit)});
};
