// The map: points on a canvas, drawn as dots or as pictures; a panel beside it shows chosen images.

const COLOURS = 10; // --class-0 to --class-9 of page.css
const SHAPES = ["circle", "square", "triangle"];
const IN_LEGEND = COLOURS * SHAPES.length; // groups with a colour and shape of their own; the others are grey
const HIT_PX = 14; // distance at which a point is hit
const PICTURE_PX = [28, 96]; // sides of pictures as points
const LISTED = 48; // cards of a selection
const PANEL_PX = 200; // side of the picture of the chosen image

const tracePath = (context, shape, x, y, size) => {
  const half = size / 2;
  context.beginPath();
  if (shape === "circle") context.arc(x, y, half, 0, 7);
  else if (shape === "square") context.rect(x - half * 0.9, y - half * 0.9, size * 0.9, size * 0.9);
  else {
    context.moveTo(x, y - half * 1.1);
    context.lineTo(x + half * 1.1, y + half * 0.9);
    context.lineTo(x - half * 1.1, y + half * 0.9);
    context.closePath();
  }
};

// What points can be coloured by: [title, group of a point, text of a group]; a group of null is grey
const colourings = (rows) => {
  const ways = [];
  if (new Set(rows.map(labelOf)).size > 1) ways.push(["class", (row) => labelOf(row) < 0 ? null : labelOf(row), className]);
  if (rows.some((row) => predictionOf(row)))
    ways.push(["right or wrong by the probe", (row) => predictionOf(row) ? Number(isWrong(row)) : null, (wrong) => wrong ? "wrong" : "right"]);
  if (new Set(rows.map(splitOf)).size > 1) ways.push(["split", (row) => splitOf(row) || null, (text) => text]);
  return ways;
};

const savedAs = (name, text, type) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};
const copied = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a browser that gives no clipboard to local files
    const area = add(document.body, "textarea", text);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
};
const asCsv = (rows) => {
  const cell = (text) => { // as in extract/system/csv_cells.py: a spreadsheet does not run it as a formula
    const value = typeof text === "string" && /^'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) && isNaN(text) ? `'${text}` : text;
    return /[",\n\r]/.test(value) ? `"${String(value).replace(/"/g, '""')}"` : value;
  };
  const lines = rows.map((row) => [rowOf(row)[3], pathOf(row), className(labelOf(row)), splitOf(row)]);
  return [["row", "path", "class", "split"], ...lines].map((line) => line.map(cell).join(",") + "\n").join("");
};

const addMap = () => {
  if (!content.map) return;
  const part = addSection("Map");
  const {rows, ways, of, near} = content.map;
  const byColour = colourings(rows);
  let way = 0, colouring = 0, lit, chosen = -1, hovered = -1, selected = null, lasso = null, selecting = false, drawAs = "auto";
  let groups, shown, looks; // group of each point; groups with a look; group -> [number of the colour, shape]
  const view = {zoom: 1, x: 0, y: 0}; // of the whole map, in pixels

  const about = add(part, "p", `Each point is an image, placed by its ${content.layer}.` +
    (rows.length < of ? ` ${count(rows.length)} of ${count(of)} images are shown, drawn at random. ` : " "));
  const note = add(about, "span", "", {class: "quiet"});

  // Controls

  const controls = add(part, "div", null, {class: "controls"});
  const addSelect = (title, options, act) => {
    const label = add(controls, "label", `${title} `);
    const select = add(label, "select", null, {"aria-label": title});
    for (const [value, text] of options) add(select, "option", text, {value});
    select.addEventListener("change", () => act(select.value));
    return select;
  };
  if (ways.length > 1) addSelect("Map", ways.map((item, i) => [i, item.name]), (value) => { way = Number(value); whole(); });
  if (byColour.length > 1) addSelect("Colour", byColour.map(([title], i) => [i, title]), (value) => { colouring = Number(value); regroup(); });
  addSelect("Points", [["auto", "dots; pictures when few are in view"], ["dots", "dots"], ["pictures", "pictures"]], (value) => { drawAs = value; draw(); });
  const choice = addSelect("Show", [], (value) => light(value === "" ? undefined : shown.all[Number(value)]));
  const search = add(add(controls, "label", "Path "), "input", null, {type: "search", placeholder: "part of a path"});
  const tools = add(controls, "span", null, {class: "tools"});
  addButton(tools, "+", () => zoomBy(1.6), {"aria-label": "Zoom in"});
  addButton(tools, "−", () => zoomBy(1 / 1.6), {"aria-label": "Zoom out"});
  addButton(tools, "Whole map", () => whole());
  const selectButton = addButton(tools, "Select by drawing", () => setSelecting(!selecting), {"aria-pressed": "false"});

  const area = add(part, "div", null, {class: "map-area"});
  const frame = add(area, "div", null, {
    class: "map", tabindex: "0", role: "group",
    "aria-label": "Map of images. Arrow keys move from point to point, plus and minus zoom, Escape clears the choice.",
  });
  const canvas = add(frame, "canvas", null, {"aria-hidden": "true"});
  const tip = add(frame, "div", null, {class: "about-point", hidden: ""});
  const side = add(area, "div", null, {class: "side"});
  const legend = add(side, "ul", null, {class: "legend", "aria-label": "Legend"});
  const panel = add(side, "div", null, {class: "panel", "aria-label": "Chosen images", role: "region", tabindex: "0"});
  const spoken = add(part, "p", "", {class: "spoken", "aria-live": "polite"});

  // Groups and their looks

  const regroup = () => {
    lit = undefined;
    const [, groupOf, textOf] = byColour[colouring] || ["", () => null, () => ""];
    groups = rows.map(groupOf);
    const sizes = new Map();
    for (const group of groups) if (group !== null) sizes.set(group, (sizes.get(group) || 0) + 1);
    const order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b);
    const all = [...sizes.keys()].sort(order);
    const alone = all.length > IN_LEGEND && sizes.get(all[0]) === 1 && Math.max(...sizes.values()) === 1;
    const largest = alone ? [] : [...all].sort((a, b) => sizes.get(b) - sizes.get(a)).slice(0, IN_LEGEND).sort(order);
    shown = {all, largest};
    looks = new Map(largest.map((group, i) => [group, [i % COLOURS, SHAPES[Math.floor(i / COLOURS)]]]));
    choice.replaceChildren();
    add(choice, "option", "all", {value: ""});
    all.forEach((group, i) => add(choice, "option", `${textOf(group)} (${count(sizes.get(group))})`, {value: i}));
    choice.parentElement.hidden = all.length < 2;
    legend.replaceChildren();
    if (all.length > 1)
      for (const group of largest) {
        const button = addButton(add(legend, "li"), null, () => light(lit === group ? undefined : group), {"aria-pressed": "false"});
        const swatch = addSvg(button, "svg", {width: 12, height: 12, viewBox: "-6 -6 12 12", "aria-hidden": "true"});
        const [number, shape] = looks.get(group);
        const paths = {circle: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", square: "M-4.5-4.5h9v9h-9z", triangle: "M0-5.5L5.5 4.5H-5.5z"};
        addSvg(swatch, "path", {d: paths[shape], style: `fill: var(--class-${number})`});
        addName(button, textOf(group));
        button.group = group;
      }
    if (alone) add(legend, "li", `${count(all.length)} classes of one image each: all points have one colour. Choose a class above to see it.`, {class: "quiet"});
    else if (largest.length < all.length)
      add(legend, "li", `${count(all.length - largest.length)} other classes are grey; choose one above to see it.`, {class: "quiet"});
    draw();
  };
  const light = (group) => {
    lit = group;
    for (const button of legend.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.group === group));
    choice.value = group === undefined ? "" : String(shown.all.indexOf(group));
    draw();
  };

  // Places of points

  const fit = () => {
    const {x, y} = ways[way];
    const [low, high] = [[Math.min(...x), Math.min(...y)], [Math.max(...x), Math.max(...y)]];
    const margin = PICTURE_PX[0], wide = frame.clientWidth, tall = frame.clientHeight;
    const scale = Math.min((wide - 2 * margin) / (high[0] - low[0] || 1), (tall - 2 * margin) / (high[1] - low[1] || 1));
    return {scale, x: wide / 2 - scale * (low[0] + high[0]) / 2, y: tall / 2 + scale * (low[1] + high[1]) / 2};
  };
  // The map reaches from its place to the end of the first screen; if little is left of that, it fills one screen. On a
  // tall screen, it is no higher than three quarters of its width with the panel.
  const setHeight = () => {
    const top = area.getBoundingClientRect().top + window.scrollY, left = window.innerHeight - top - 12;
    const height = Math.min(left > 380 ? left : Math.max(320, window.innerHeight - 180), 0.75 * area.clientWidth);
    area.style.setProperty("--height", `${height}px`);
  };
  let base;
  const placeOf = (point) => [
    view.x + view.zoom * (base.x + base.scale * ways[way].x[point]), view.y + view.zoom * (base.y - base.scale * ways[way].y[point]),
  ];
  frame.placeOf = placeOf; // pixels from the upper left corner of the map
  const inView = () => {
    const [wide, tall] = [frame.clientWidth, frame.clientHeight], points = [];
    for (let i = 0; i < rows.length; i++) {
      const [x, y] = placeOf(i);
      if (x > -20 && y > -20 && x < wide + 20 && y < tall + 20) points.push(i);
    }
    return points;
  };
  const pointAt = (x, y) => {
    let best = -1, least = (frame.pictures ? frame.pictures / 2 : HIT_PX) ** 2;
    for (let i = 0; i < rows.length; i++) {
      const place = placeOf(i), far = (place[0] - x) ** 2 + (place[1] - y) ** 2;
      if (far <= least) [best, least] = [i, far];
    }
    return best;
  };

  // Drawing

  const bitmaps = sheets.map(() => null);
  let painted = false;
  const draw = () => {
    if (painted) return;
    painted = true;
    requestAnimationFrame(() => { painted = false; paint(); });
  };
  const paint = () => {
    const [wide, tall, ratio] = [frame.clientWidth, frame.clientHeight, window.devicePixelRatio || 1];
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(tall * ratio);
    }
    base = fit();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const palette = Array.from({length: COLOURS}, (_, i) => colour(`--class-${i}`)), grey = colour("--grey");
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, tall);
    const points = inView();
    const chosenSet = selected && new Set(selected);
    const isLit = (point) => (lit === undefined || groups[point] === lit) && (!chosenSet || chosenSet.has(point));
    const room = Math.sqrt(wide * tall / Math.max(1, points.length));
    const pictures = drawAs === "pictures" || drawAs === "auto" && sheets.length > 0 && room > 1.3 * PICTURE_PX[0];
    frame.pictures = pictures ? Math.max(PICTURE_PX[0], Math.min(PICTURE_PX[1], 0.8 * room)) : 0;
    frame.dataset.drawn = pictures ? "pictures" : "dots";
    const size = (points.length > 1500 ? 5 : points.length > 300 ? 7 : 9);
    const neighbours = chosen >= 0 && near ? near[chosen].filter((point) => point >= 0) : [];
    context.lineWidth = 1.5;
    context.strokeStyle = colour("--quiet");
    for (const other of neighbours) {
      context.beginPath();
      context.moveTo(...placeOf(chosen));
      context.lineTo(...placeOf(other));
      context.stroke();
    }
    for (const point of points.filter((item) => !isLit(item)).concat(points.filter(isLit))) {
      const [x, y] = placeOf(point), bright = isLit(point);
      const [number, shape] = looks.get(groups[point]) || [lit !== undefined && groups[point] === lit ? 0 : -1, "circle"];
      const shade = bright && number >= 0 ? palette[number] : grey;
      context.globalAlpha = bright ? 0.9 : 0.3;
      const tile = pictures && tileOf(rows[point]);
      if (tile && bitmaps[tile.sheet]) {
        const scale = frame.pictures / Math.max(tile.width, tile.height), [w, h] = [tile.width * scale, tile.height * scale];
        context.drawImage(bitmaps[tile.sheet], tile.x, tile.y, tile.width, tile.height, x - w / 2, y - h / 2, w, h);
        context.strokeStyle = shade;
        context.lineWidth = groups[point] === null ? 1 : 2.5;
        context.strokeRect(x - w / 2, y - h / 2, w, h);
      } else {
        context.fillStyle = shade;
        tracePath(context, shape, x, y, bright && (lit !== undefined || chosenSet) ? size + 3 : size);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = colour("--text");
    for (const [point, radius] of [...neighbours.map((item) => [item, 6]), [chosen, 10], [hovered, 8]]) {
      if (point < 0) continue;
      const [x, y] = placeOf(point), around = Math.max(radius, frame.pictures * 0.6);
      context.lineWidth = point === chosen ? 3 : 1.5;
      if (frame.pictures) context.strokeRect(x - around, y - around, 2 * around, 2 * around);
      else {
        tracePath(context, "circle", x, y, 2 * around);
        context.stroke();
      }
    }
    if (!lasso) return;
    context.setLineDash([5, 4]);
    context.lineWidth = 1.5;
    context.beginPath();
    for (const corner of lasso) context.lineTo(...corner);
    context.closePath();
    context.stroke();
    context.setLineDash([]);
  };
  sheets.forEach((blob, number) => createImageBitmap(blob).then((bitmap) => { bitmaps[number] = bitmap; draw(); }));

  // The panel

  const describe = (parent, row) => {
    addName(parent, pathOf(row)).className = "path";
    const lines = [[`row ${count(rowOf(row)[3])}`], splitOf(row) ? [`split ${splitOf(row)}`] : null].filter(Boolean);
    if (labelOf(row) >= 0) addName(add(parent, "div"), className(labelOf(row)));
    const prediction = predictionOf(row);
    if (prediction) {
      const line = add(parent, "div", isWrong(row) ? "✗ predicted: " : "✓ predicted: ", {class: isWrong(row) ? "wrong" : "right"});
      addName(line, prediction[1]);
      line.append(certainty(prediction[2]));
    }
    add(parent, "div", lines.map(([text]) => text).join(", "), {class: "quiet"});
  };
  const showPanel = () => {
    panel.replaceChildren();
    if (chosen >= 0) {
      const row = rows[chosen];
      const box = add(panel, "div", null, {class: "chosen"});
      addPicture(box, row, PANEL_PX);
      describe(add(box, "div"), row);
      const hits = near ? near[chosen].filter((point) => point >= 0) : [];
      add(panel, "h3", near ? `The ${hits.length} nearest images on the map` : "Nearest images");
      if (!near) add(panel, "p", "They are not computed for features this wide.");
      const strip = add(panel, "ul", null, {class: "strip"});
      for (const hit of hits) addCard(strip, rows[hit], [], {mark: sameClass(row, rows[hit])});
    } else if (selected) {
      add(panel, "h3", `${plural(selected.length, "image")} selected`);
      const buttons = add(panel, "div", null, {class: "controls"});
      const selectedRows = selected.map((point) => rows[point]);
      if (selected.length) {
        const copy = addButton(buttons, "Copy paths", async () => {
          await copied(selectedRows.map(pathOf).join("\n"));
          copy.textContent = "Copied";
        });
        addButton(buttons, "Save CSV", () => savedAs("selection.csv", asCsv(selectedRows), "text/csv"));
      }
      addButton(buttons, "Clear", () => select(null));
      if (selected.length > LISTED) add(panel, "p", `The first ${LISTED} are shown.`, {class: "quiet"});
      const strip = add(panel, "ul", null, {class: "strip"});
      for (const row of selectedRows.slice(0, LISTED)) addCard(strip, row, []);
    } else {
      add(panel, "p", "Click an image to see its nearest images. Click the map, then zoom with the wheel; drag to move. " +
        "“Select by drawing” and the search for a path select images, whose paths can be copied or saved.", {class: "quiet"});
      const [odd] = ["suspect label", "outlier", "near-duplicate", "copy"].filter((kind) => findings.counts[kind]);
      const found = odd ? findingsOf(odd).map(([, row, , , , , , suggested]) => [row, suggested]) : rows.map((row) => [row, ""]);
      add(panel, "h3", odd ? KINDS[odd][0] : "Some of the images");
      const strip = add(panel, "ul", null, {class: "strip"});
      for (const [row, suggested] of found.filter(([row]) => !sheets.length || tileOf(row)).slice(0, 12)) addCard(strip, row, [], {suggested});
    }
  };
  const choose = (point) => {
    chosen = point;
    spoken.textContent = point < 0 ? "" : `Row ${count(rowOf(rows[point])[3])}: ${pathOf(rows[point])}` +
      (labelOf(rows[point]) >= 0 ? `, class ${className(labelOf(rows[point]))}` : "");
    showPanel();
    draw();
  };
  const select = (points) => {
    selected = points;
    if (points === null) search.value = "";
    choose(-1);
    if (points) spoken.textContent = `${plural(points.length, "image")} selected`;
  };
  search.addEventListener("input", () => {
    const text = search.value.toLowerCase();
    select(text ? [...rows.keys()].filter((point) => pathOf(rows[point]).toLowerCase().includes(text)) : null);
  });
  const hover = (point) => {
    if (point === hovered) return;
    hovered = point;
    tip.hidden = point < 0;
    tip.replaceChildren();
    if (point >= 0) {
      addPicture(tip, rows[point]);
      describe(tip, rows[point]);
      const [x, y] = placeOf(point), [wide, tall] = [tip.offsetWidth, tip.offsetHeight], gap = 14 + frame.pictures / 2;
      tip.style.left = `${Math.max(0, Math.min(frame.clientWidth - wide, x + gap + wide > frame.clientWidth ? x - wide - gap : x + gap))}px`;
      tip.style.top = `${Math.max(0, Math.min(frame.clientHeight - tall, y - tall / 2))}px`;
    }
    draw();
  };

  // Moving, zooming, selecting

  const zoomBy = (factor, x = frame.clientWidth / 2, y = frame.clientHeight / 2) => {
    const zoom = Math.max(1, Math.min(60, view.zoom * factor)), ratio = zoom / view.zoom;
    [view.x, view.y, view.zoom] = zoom === 1 ? [0, 0, 1] : [x - ratio * (x - view.x), y - ratio * (y - view.y), zoom];
    frame.classList.toggle("zoomed", zoom > 1); // on a touch screen, one finger then moves the map, not the page
    hover(-1);
    draw();
  };
  const whole = () => {
    [view.x, view.y, view.zoom] = [0, 0, 1];
    frame.classList.remove("zoomed");
    note.textContent = ways[way].note;
    draw();
  };
  const setSelecting = (on) => {
    selecting = on;
    selectButton.setAttribute("aria-pressed", String(on));
    frame.classList.toggle("selecting", on);
  };
  const isInside = ([x, y], corners) => { // even-odd rule
    let inside = false;
    for (let i = 0, j = corners.length - 1; i < corners.length; j = i++) {
      const [[ax, ay], [bx, by]] = [corners[i], corners[j]];
      if ((ay > y) !== (by > y) && x < (bx - ax) * (y - ay) / (by - ay) + ax) inside = !inside;
    }
    return inside;
  };
  const fingers = new Map();
  let moved = false;
  const at = (event) => {
    const box = frame.getBoundingClientRect();
    return [event.clientX - box.left - frame.clientLeft, event.clientY - box.top - frame.clientTop];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    frame.focus({preventScroll: true});
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, at(event));
    moved = fingers.size > 1;
    lasso = selecting && fingers.size === 1 ? [at(event)] : null;
  });
  canvas.addEventListener("pointermove", (event) => {
    const place = at(event), last = fingers.get(event.pointerId);
    if (!last) {
      if (event.pointerType === "mouse") hover(pointAt(...place));
      return;
    }
    if (Math.hypot(place[0] - last[0], place[1] - last[1]) > 3) moved = true;
    if (!moved) return;
    hover(-1);
    if (lasso) lasso.push(place);
    else if (fingers.size === 2) {
      const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, where]) => where);
      const length = (where) => Math.hypot(where[0] - other[0], where[1] - other[1]) || 1;
      zoomBy(length(place) / length(last), (place[0] + other[0]) / 2, (place[1] + other[1]) / 2);
    } else if (view.zoom > 1) [view.x, view.y] = [view.x + place[0] - last[0], view.y + place[1] - last[1]];
    fingers.set(event.pointerId, place);
    draw();
  });
  const release = (event) => {
    if (!fingers.delete(event.pointerId)) return;
    const corners = lasso;
    lasso = null;
    if (event.type === "pointercancel") return;
    if (corners && moved) {
      select([...rows.keys()].filter((point) => isInside(placeOf(point), corners)));
      setSelecting(false);
    } else if (!moved) choose(pointAt(...at(event)));
    draw();
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== frame) return; // the page scrolls until the map is clicked
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002)), ...at(event));
  }, {passive: false});
  const nextPoint = (dx, dy) => {
    const {x, y} = ways[way];
    if (chosen < 0) return 0;
    let best = chosen, least = Infinity;
    for (let i = 0; i < x.length; i++) {
      const [along, across] = dx ? [dx * (x[i] - x[chosen]), y[i] - y[chosen]] : [dy * (y[i] - y[chosen]), x[i] - x[chosen]];
      const far = along + 2 * Math.abs(across);
      if (along > 0 && far < least) [best, least] = [i, far];
    }
    return best;
  };
  frame.addEventListener("keydown", (event) => {
    const move = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[event.key];
    if (move) choose(nextPoint(...move));
    else if (event.key === "Escape") select(null);
    else if (event.key === "+" || event.key === "-") zoomBy(event.key === "+" ? 1.6 : 1 / 1.6);
    else return;
    event.preventDefault();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", setHeight);
  new ResizeObserver(draw).observe(frame);
  showPanel();
  whole();
  regroup();
  setHeight();
  base = fit();
};
