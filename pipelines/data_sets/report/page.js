"use strict";
// Shows the content of the page. Every text that comes from the data set is set as text, and nothing is fetched.
(() => {
  const content = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("content");
  const contents = document.getElementById("contents");

  // Of Okabe and Ito: they can be told apart in the common forms of colour blindness; and shapes besides.
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D1F"];
  const SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const IN_LEGEND = 21; // classes that have a colour and shape of their own; more cannot be told apart
  const OTHERS = -2;

  // Elements

  const add = (parent, tag, text, attributes) => {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    parent.append(element);
    return element;
  };
  const name = (parent, text) => add(parent, "bdi", text, {dir: "auto", title: text});
  const count = (number) => number.toLocaleString("en");
  const percent = (share) => share > 0 && share < 0.001 ? "less than 0.1 %" : (100 * share).toFixed(1) + " %";
  const short = (number) => {
    if (number === null || number === undefined) return "–";
    const size = Math.abs(number);
    return size !== 0 && (size < 0.001 || size >= 1e6) ? number.toExponential(2) : Number(number.toPrecision(4)).toString();
  };
  const plural = (number, singular, many) => `${count(number)} ${number === 1 ? singular : many || singular + "s"}`;
  const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  let sections = 0;
  const section = (title) => {
    const id = `section-${++sections}`;
    const element = add(main, "section", null, {"aria-labelledby": id});
    add(element, "h2", title, {id});
    add(add(contents, "li"), "a", title, {href: `#${id}`});
    return element;
  };

  // Tables whose columns sort: [title, "text" | "number", value of a row -> what is sorted by, what is shown]

  const table = (parent, caption, columns, rows) => {
    const scroll = add(parent, "div", null, {class: "scroll", tabindex: "0", role: "region", "aria-label": caption});
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
        else name(cell, text ?? "");
      }
      return [line, row];
    });
    const headings = columns.map(([title, kind, value]) => {
      const heading = add(head, "th", null, {scope: "col", "aria-sort": "none", ...(kind === "number" ? {class: "number"} : {})});
      add(heading, "button", title, {type: "button"}).addEventListener("click", () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        for (const other of headings) other.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => kind === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
        lines.sort(([, left], [, right]) => {
          const [a, b] = [value(left), value(right)];
          const missing = (x) => x === null || x === undefined;
          if (missing(a) || missing(b)) return missing(a) - missing(b); // what is missing comes last, either way
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

  const row = (number) => content.rows[number] || ["", -1, "", number];
  const pathOf = (number) => row(number)[0];
  const className = (label) => label < 0 ? "" : content.classes[label] ? content.classes[label][0] : `class ${label}`;
  const picture = (parent, number) => {
    const frame = add(parent, "div", null, {class: "picture"});
    const data = content.thumbnails[number];
    if (data) {
      const image = add(frame, "img", null, {alt: "", decoding: "async"});
      image.src = data;
    } else frame.textContent = "no picture";
    return frame;
  };
  const card = (parent, number, lines, kind) => {
    const element = add(parent, "li", null, {class: `card ${kind || ""}`});
    picture(element, number);
    for (const line of lines) add(element, "div", line);
    const [path, label, , ] = row(number);
    const text = name(element, path.split("/").pop());
    text.title = path;
    if (label >= 0) name(element, className(label)).className = "quiet";
    return element;
  };

  // Plots; they are drawn again when light and dark change

  const plots = [];
  const still = {displaylogo: false, responsive: true, displayModeBar: false, staticPlot: false, showTips: false};
  const style = (layout) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 48, r: 12, t: 10, b: 40},
    font: {color: colour("--text"), size: 12, family: "system-ui, sans-serif"}, showlegend: false, dragmode: false,
    ...layout,
    xaxis: {gridcolor: colour("--plot-line"), zerolinecolor: colour("--line"), fixedrange: true, automargin: true, ...layout.xaxis},
    yaxis: {gridcolor: colour("--plot-line"), zerolinecolor: colour("--line"), fixedrange: true, automargin: true, ...layout.yaxis},
  });
  const plot = (parent, label, traces, layout) => {
    const element = add(parent, "div", null, {class: "plot", role: "img", "aria-label": label});
    const draw = () => Plotly.react(element, traces(), style(layout()), still);
    plots.push(draw);
    draw();
    return element;
  };
  const histogram = (parent, label, title, counts, edges) => {
    const figure = add(parent, "figure");
    plot(figure, label, () => [{
      type: "bar", x: counts.map((_, i) => (edges[i] + edges[i + 1]) / 2), y: counts,
      width: counts.map((_, i) => edges[i + 1] - edges[i]), marker: {color: colour("--bar")},
      hovertemplate: "%{y:,} images near %{x:.4g}<extra></extra>",
    }], () => ({xaxis: {title: {text: title}}, yaxis: {title: {text: "images"}}, bargap: 0, height: 250}));
    add(figure, "figcaption", label);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((draw) => draw()));

  // Sections

  const overview = () => {
    document.title = `${content.title} – layertap report`;
    const title = document.getElementById("title");
    title.textContent = "";
    name(title, content.title);
    const {rows, good, failed, classes} = content.counts;
    document.getElementById("lead").textContent =
      `${plural(rows, "image")}, ${count(good)} with features${failed ? `, ${count(failed)} failed` : ""}.`;
    document.getElementById("footer").textContent =
      `Written ${content.written} by layertap ${content.version}. This page loads no other files.`;
    const part = section("Data set");
    for (const note of content.notes) add(part, "p", note, {class: "note"});
    if (content.about_thumbnails) add(part, "p", content.about_thumbnails, {class: "quiet"});
    const tiles = add(part, "div", null, {class: "tiles"});
    const tile = (number, text) => {
      const element = add(tiles, "div", null, {class: "tile"});
      add(element, "b", number);
      element.append(text);
    };
    tile(count(rows), "rows");
    tile(count(good), "with features");
    tile(count(failed), "failed");
    tile(count(classes), "classes");
    tile(count(content.layers.length), content.layers.length === 1 ? "layer" : "layers");
    const list = add(part, "dl", null, {class: "facts"});
    for (const [what, how] of content.facts) {
      add(list, "dt", what);
      name(add(list, "dd"), how);
    }
  };

  const classTable = () => {
    if (!content.classes.length) return;
    const part = section("Classes");
    add(part, "p", `${plural(content.counts.classes, "class", "classes")}` +
      (content.unlabelled ? `; ${plural(content.unlabelled, "image")} without a class.` : "."));
    const sizes = content.classes.map(([, all]) => all);
    if (content.classes.length > 1 && content.classes.length <= 40) {
      plot(part, "Images of each class", () => [{
        type: "bar", orientation: "h", y: content.classes.map((_, i) => i), x: sizes, marker: {color: colour("--bar")},
        customdata: content.classes.map(([text]) => escaped(text)), hovertemplate: "%{customdata}: %{x:,}<extra></extra>",
      }], () => ({
        height: 70 + 20 * content.classes.length, xaxis: {title: {text: "images"}},
        yaxis: {tickvals: content.classes.map((_, i) => i), ticktext: content.classes.map(([text]) => escaped(text, 24)), autorange: "reversed"},
      }));
    }
    table(part, "Images of each class", [
      ["Class", "text", (item) => item[0]],
      ["Images", "number", (item) => item[1], (item) => count(item[1])],
      ["With features", "number", (item) => item[2], (item) => count(item[2])],
    ], content.classes);
  };

  // Plotly reads some tags and entities in its texts; a name has none.
  const escaped = (text, most) => {
    const shown = most && [...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text;
    return shown.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;").replace(/%\{/g, "%&#123;");
  };

  const failures = () => {
    const part = section("Failures");
    if (!content.counts.failed) {
      add(part, "p", "Every image has features.");
      return;
    }
    add(part, "p", `${plural(content.counts.failed, "image")} ${content.counts.failed === 1 ? "has" : "have"} no features (` +
      Object.entries(content.status).filter(([what]) => what !== "ok").map(([what, number]) => `${count(number)} ${what}`).join(", ") + ")." +
      (content.failures.length < content.counts.failed ? ` The first ${count(content.failures.length)} are listed.` : ""));
    const shown = content.failures.filter(([number]) => content.thumbnails[number]);
    if (shown.length) {
      add(part, "p", "These images can be decoded in part. The part is shown here, but has no features.", {class: "quiet"});
      const strip = add(part, "ul", null, {class: "strip"});
      for (const [number, status] of shown) card(strip, number, [status]);
    }
    table(part, "Images without features", [
      ["Row", "number", ([number]) => row(number)[3], ([number]) => count(row(number)[3])],
      ["Path", "text", ([number]) => pathOf(number)],
      ["Status", "text", (item) => item[1]],
      ["Reason", "text", (item) => item[2]],
    ], content.failures);
  };

  const time = () => {
    const stages = Object.entries(content.stages);
    if (!content.runs.length && !stages.length) return;
    const part = section("Runs and time");
    const total = stages.reduce((sum, [, seconds]) => sum + seconds, 0);
    if (total > 0) {
      add(part, "p", "Time of the runs, by stage: " + stages.map(([what, seconds]) =>
        `${what} ${percent(seconds / total)} (${seconds.toFixed(1)} s)`).join(", ") + ".");
      const bar = add(part, "div", null, {class: "bar", "aria-hidden": "true"});
      const key = add(part, "p", null, {class: "quiet"});
      stages.forEach(([what, seconds], i) => {
        const piece = add(bar, "span");
        piece.style.flexGrow = seconds / total;
        piece.style.background = COLOURS[i % COLOURS.length];
        const swatch = add(key, "span", null, {class: "swatch"});
        swatch.style.background = COLOURS[i % COLOURS.length];
        key.append(`${what}  `);
      });
    }
    const rate = (item) => item.seconds > 0 && item.rows ? item.rows / item.seconds : null;
    table(part, "Runs, newest first", [
      ["Started", "text", (item) => item.started.replace("T", " ")],
      ["How it ended", "text", (item) => item.how + (item.engine ? `, ${item.engine}` : "")],
      ["Images computed", "number", (item) => item.rows, (item) => item.rows === undefined ? null : count(item.rows)],
      ["Seconds", "number", (item) => item.seconds, (item) => item.seconds === undefined ? null : item.seconds.toFixed(1)],
      ["Images/s", "number", rate, (item) => rate(item) === null ? null : rate(item).toFixed(1)],
      ["Device", "text", (item) => item.where],
    ], content.runs);
  };

  const layers = () => {
    const part = section("Layers");
    add(part, "p", "Statistics of all values of the rows with features. The length of a row is its Euclidean norm.");
    table(part, "Statistics by layer", [
      ["Layer", "text", (item) => item.name],
      ["From", "text", (item) => item.from],
      ["Shape", "number", (item) => item.width, (item) => `${item.shape.join("×")} ${item.dtype}`],
      ["Mean", "number", (item) => item.mean, (item) => short(item.mean)],
      ["Std", "number", (item) => item.std, (item) => short(item.std)],
      ["Min", "number", (item) => item.least, (item) => short(item.least)],
      ["Max", "number", (item) => item.largest, (item) => short(item.largest)],
      ["Zeros", "number", (item) => item.zeros, (item) => item.zeros === null ? null : percent(item.zeros)],
      ["Always zero", "number", (item) => item.dead, (item) => count(item.dead)],
      ["Constant", "number", (item) => item.constant, (item) => count(item.constant)],
      ["Length min", "number", (item) => item.lengths[0], (item) => short(item.lengths[0])],
      ["Median", "number", (item) => item.lengths[1], (item) => short(item.lengths[1])],
      ["Max", "number", (item) => item.lengths[2], (item) => short(item.lengths[2])],
    ], content.layers);
    const few = content.layers.filter((item) => item.counts.length && item.lengths[0] < item.lengths[2]);
    if (!few.length) return;
    add(part, "h3", "Lengths of rows");
    if (few.length > 12) add(part, "p", `The last 12 of ${few.length} layers are shown.`, {class: "quiet"});
    const grid = add(part, "div", null, {class: "plots"});
    for (const item of few.slice(-12)) histogram(grid, item.name, "length", item.counts, item.edges);
  };

  // The map

  const looks = () => {
    const sizes = new Map();
    for (const number of content.map.rows) sizes.set(row(number)[1], (sizes.get(row(number)[1]) || 0) + 1);
    const known = [...sizes.keys()].filter((label) => label >= 0).sort((a, b) => sizes.get(b) - sizes.get(a) || a - b);
    const shown = known.length > IN_LEGEND ? known.slice(0, IN_LEGEND) : known;
    const of = new Map(shown.sort((a, b) => a - b).map((label, i) => [label, [COLOURS[i % COLOURS.length], SHAPES[Math.floor(i / COLOURS.length)]]]));
    return {sizes, known: known.sort((a, b) => a - b), shown, of};
  };

  const glyph = (parent, shade, shape) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const paths = {
      circle: "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10", square: "M1.5 1.5h9v9h-9z", diamond: "M6 0l6 6l-6 6l-6-6z",
      "triangle-up": "M6 1l5.5 10h-11z", cross: "M4 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
      star: "M6 0l1.5 4.2h4.4l-3.6 2.7l1.3 4.4l-3.6-2.6l-3.6 2.6l1.3-4.4l-3.6-2.7h4.4z",
    };
    for (const [key, value] of Object.entries({width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true"})) svg.setAttribute(key, value);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", paths[shape]);
    path.setAttribute("fill", shade);
    svg.append(path);
    parent.append(svg);
  };

  const map = () => {
    if (!content.map) return;
    const part = section("Map");
    const {rows, ways, of} = content.map;
    const {sizes, known, shown, of: lookOf} = looks();
    const labels = rows.map((number) => row(number)[1]);
    let way = 0, lit = null, chosen = -1, drag = false;

    add(part, "p", `Each point is an image, placed by its ${content.layer}` + (known.length ? ", coloured by class." : "."));
    if (rows.length < of) add(part, "p", `${count(rows.length)} of ${count(of)} images are shown, drawn at random.`);
    const note = add(part, "p", "", {class: "quiet"});
    const controls = add(part, "div", null, {class: "controls"});
    const waysButtons = ways.length > 1 ? ways.map((item, i) => {
      const button = add(controls, "button", item.name, {type: "button", "aria-pressed": String(i === 0)});
      button.addEventListener("click", () => { way = i; choose(-1); draw(); });
      return button;
    }) : [];
    if (known.length > 1) {
      const select = add(add(controls, "label", "Show "), "select", null, {"aria-label": "Class to show"});
      add(select, "option", "all classes", {value: ""});
      for (const label of known) add(select, "option", `${className(label)} (${count(sizes.get(label))})`, {value: label});
      select.addEventListener("change", () => light(select.value === "" ? null : Number(select.value)));
      controls.select = select;
    }
    const zoom = add(controls, "button", "Zoom with the mouse", {type: "button", "aria-pressed": "false"});
    zoom.addEventListener("click", () => { drag = !drag; zoom.setAttribute("aria-pressed", String(drag)); draw(); });
    const whole = add(controls, "button", "Whole map", {type: "button"});

    const legend = add(part, "ul", null, {class: "legend", "aria-label": "Classes"});
    const buttons = new Map();
    if (known.length > 1) {
      for (const label of shown) {
        const button = add(add(legend, "li"), "button", null, {type: "button", "aria-pressed": "false"});
        glyph(button, ...lookOf.get(label));
        name(button, className(label));
        button.addEventListener("click", () => light(lit === label ? null : label));
        buttons.set(label, button);
      }
      if (shown.length < known.length)
        add(add(legend, "li", null, {class: "quiet"}), "span", `${count(known.length - shown.length)} other classes are grey; choose one above to see it.`);
    }

    const frame = add(part, "div", null, {
      class: "map", tabindex: "0", role: "group",
      "aria-label": "Map of images. Arrow keys move from point to point, Escape closes the image.",
    });
    const element = add(frame, "div", null, {class: "plot"});
    const about = add(frame, "div", null, {class: "about-point", hidden: ""});
    add(part, "p", "Hover over a point to see its image; or focus the map with Tab, and move from point to point with the arrow keys.", {class: "quiet"});
    const spoken = add(part, "p", "", {class: "quiet", "aria-live": "polite"});

    const look = (label) => lit === null
      ? lookOf.get(label) || [colour("--grey"), "circle"]
      : label === lit ? lookOf.get(label) || [COLOURS[5], "circle"] : [colour("--grey"), "circle"];
    const drawn = () => ways[way].x.length;
    const traces = () => {
      const looked = labels.slice(0, drawn()).map(look);
      const size = drawn() > 1500 ? 5 : drawn() > 300 ? 7 : 9;
      const ring = chosen < 0 ? [[], []] : [[ways[way].x[chosen]], [ways[way].y[chosen]]];
      return [
        {
          type: "scatter", mode: "markers", x: ways[way].x, y: ways[way].y, hoverinfo: "none",
          marker: {
            size: labels.slice(0, drawn()).map((label) => lit !== null && label === lit ? size + 3 : size),
            color: looked.map(([shade]) => shade), symbol: looked.map(([, shape]) => shape),
            opacity: labels.slice(0, drawn()).map((label) => lit === null || label === lit ? 0.85 : 0.3), line: {width: 0},
          },
        },
        {type: "scatter", mode: "markers", x: ring[0], y: ring[1], hoverinfo: "skip",
          marker: {size: 18, symbol: "circle-open", color: colour("--text"), line: {width: 3}}},
      ];
    };
    const layout = () => style({
      margin: {l: 8, r: 8, t: 8, b: 8}, hovermode: "closest", hoverdistance: 24, dragmode: drag ? "zoom" : false, uirevision: `${way}`,
      xaxis: {showticklabels: false, showgrid: false, zeroline: false, fixedrange: !drag},
      yaxis: {showticklabels: false, showgrid: false, zeroline: false, fixedrange: !drag},
    });
    const draw = () => {
      note.textContent = ways[way].note + (drawn() < rows.length ? ` It shows ${count(drawn())} of these images.` : "");
      waysButtons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === way)));
      return Plotly.react(element, traces(), layout(), {...still, doubleClick: "reset"});
    };
    const light = (label) => {
      lit = label;
      for (const [key, button] of buttons) button.setAttribute("aria-pressed", String(key === label));
      if (controls.select) controls.select.value = label === null ? "" : String(label);
      draw();
    };
    const place = (point) => {
      const {xaxis, yaxis} = element._fullLayout;
      const left = xaxis._offset + xaxis.l2p(ways[way].x[point]), top = yaxis._offset + yaxis.l2p(ways[way].y[point]);
      const [wide, high] = [about.offsetWidth, about.offsetHeight];
      about.style.left = `${Math.max(0, Math.min(frame.clientWidth - wide, left + 14 + wide > frame.clientWidth ? left - wide - 14 : left + 14))}px`;
      about.style.top = `${Math.max(0, Math.min(frame.clientHeight - high, top - high / 2))}px`;
    };
    const show = (point) => {
      about.replaceChildren();
      about.hidden = point < 0;
      if (point < 0) return;
      const box = add(about, "div", null, {class: "card"});
      picture(box, rows[point]);
      name(box, pathOf(rows[point]));
      if (labels[point] >= 0) name(box, className(labels[point])).className = "quiet";
      add(box, "div", `row ${count(row(rows[point])[3])}`, {class: "quiet"});
      place(point);
    };
    const choose = (point) => {
      chosen = point;
      show(point);
      spoken.textContent = point < 0 ? "" : `Row ${count(row(rows[point])[3])}: ${pathOf(rows[point])}` +
        (labels[point] >= 0 ? `, class ${className(labels[point])}` : "");
    };
    const next = (dx, dy) => {
      const {x, y} = ways[way];
      if (chosen < 0) return 0;
      const wide = Math.max(...x) - Math.min(...x) || 1, high = Math.max(...y) - Math.min(...y) || 1;
      let best = chosen, least = Infinity;
      for (let i = 0; i < x.length; i++) {
        const [along, across] = dx ? [dx * (x[i] - x[chosen]) / wide, (y[i] - y[chosen]) / high] : [dy * (y[i] - y[chosen]) / high, (x[i] - x[chosen]) / wide];
        const far = along + 2 * Math.abs(across);
        if (along > 0 && far < least) [best, least] = [i, far];
      }
      return best;
    };
    frame.addEventListener("keydown", (event) => {
      const move = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[event.key];
      if (move) {
        event.preventDefault();
        choose(next(...move));
        draw();
      } else if (event.key === "Escape") {
        choose(-1);
        draw();
      }
    });
    plots.push(draw);
    draw();
    element.on("plotly_hover", (event) => { if (event.points[0].curveNumber === 0) show(event.points[0].pointNumber); });
    element.on("plotly_unhover", () => show(chosen));
    element.on("plotly_click", (event) => { if (event.points[0].curveNumber === 0) { choose(event.points[0].pointNumber); draw(); } });
    element.on("plotly_relayout", () => { if (chosen >= 0) show(chosen); });
    whole.addEventListener("click", () => Plotly.relayout(element, {"xaxis.autorange": true, "yaxis.autorange": true}));
  };

  // Alike

  const neighbours = () => {
    if (!content.alike) return;
    const {k, among, queries, gallery, same_class: same, by_chance: chance, counts, edges} = content.alike;
    const part = section("Neighbours");
    add(part, "p", `Images are compared by the cosine of their ${content.layer}: 1 is the same direction. Of images with the same bytes, only the first is compared.`);
    if (queries < among)
      add(part, "p", `Neighbours of ${count(queries)} randomly drawn images were searched among all ${count(among)}; near-duplicates and outliers are of these ${count(queries)} images only.`);
    if (same !== undefined)
      add(part, "p", `${percent(same)} of the ${k} nearest images have the class of the query; by chance it would be ${percent(chance)}.`);
    for (const {row: number, hits} of gallery) {
      const strip = add(part, "ul", null, {class: "strip row-strip", tabindex: "0", "aria-label": `Nearest to ${pathOf(number)}`});
      card(strip, number, ["query"], "query");
      for (const [hit, near] of hits) card(strip, hit, [near.toFixed(3)]);
    }
    if (counts.some((item) => item)) histogram(add(part, "div", null, {class: "plots"}), "Cosine of each image and its nearest image", "cosine", counts, edges);
  };

  const duplicates = () => {
    const part = section("Copies and near-duplicates");
    const {groups, images, rows} = content.copies;
    add(part, "h3", "Copies: the same bytes");
    if (!images) add(part, "p", "No two images have the same bytes.");
    else {
      add(part, "p", `${plural(images, "image")} ${images === 1 ? "occurs" : "occur"} more than once, in ${count(rows)} rows.` +
        (groups.length < images ? ` The ${groups.length} images with the most copies are shown.` : ""));
      const strip = add(part, "ul", null, {class: "strip"});
      for (const {rows: some, count: all, classes, splits} of groups) {
        const element = add(strip, "li", null, {class: "pair"});
        add(element, "p", `${count(all)} copies` + (classes > 1 ? `, in ${classes} classes` : "") + (splits > 1 ? `, in ${splits} splits` : ""));
        const list = add(element, "ul", null, {class: "strip"});
        card(list, some[0], []);
        const names = add(element, "p", null, {class: "quiet"});
        some.slice(1).forEach((number) => { name(names, pathOf(number)); names.append(" "); });
        if (all > some.length) names.append(`and ${count(all - some.length)} more`);
      }
    }
    if (!content.alike) return;
    const {pairs, n_pairs: all, threshold, outliers, k} = content.alike;
    add(part, "h3", `Near-duplicates: a cosine of at least ${threshold}`);
    if (!all) add(part, "p", "None among the images that were compared.");
    else {
      add(part, "p", `${plural(all, "pair")}` + (pairs.length < all ? `; the ${pairs.length} most similar pairs:` : ":"));
      const strip = add(part, "ul", null, {class: "strip"});
      for (const [first, second, near] of pairs) {
        const element = add(strip, "li", null, {class: "pair"});
        add(element, "p", `cosine ${near.toFixed(4)}` + (row(first)[1] !== row(second)[1] ? ", in two classes" : "") + (row(first)[2] !== row(second)[2] ? ", in two splits" : ""));
        const list = add(element, "ul", null, {class: "strip"});
        card(list, first, []);
        card(list, second, []);
      }
    }
    const last = section("Outliers");
    if (!outliers.length) add(last, "p", `Too few images to tell: there are at most ${k}.`);
    else {
      add(last, "p", `Images with the smallest mean cosine to their ${k} nearest images:`);
      const strip = add(last, "ul", null, {class: "strip"});
      for (const [number, mean] of outliers) card(strip, number, [mean.toFixed(3)]);
    }
  };

  const probes = () => {
    if (!content.probes.length) return;
    const part = section("Linear probes");
    const shares = ["top1", "top5", "balanced_accuracy"];
    const isShare = (metric) => shares.includes(metric.split("@")[0]);
    const value = (metric, number) => number === null || number === undefined ? null : isShare(metric) ? percent(number) : short(number);
    for (const {name: title, protocol, metrics, complete, layers: probed} of content.probes) {
      add(part, "h3", `${protocol} (${title})`);
      if (!complete) add(part, "p", "This probe did not finish.", {class: "note"});
      const first = metrics[0], factor = isShare(first) ? 100 : 1;
      if (probed.length > 1) {
        const names = [...new Set(probed.map((item) => item.layer))], sets = [...new Set(probed.map((item) => item.data_set))];
        plot(part, `${first} by layer`, () => sets.map((set, number) => {
          const here = probed.filter((item) => item.data_set === set), shade = COLOURS[number % COLOURS.length];
          const estimate = here.map((item) => (item.metrics[first] || [null, null, null]).map((end) => end === null ? null : factor * end));
          return {
            type: "scatter", mode: "markers+lines", name: escaped(set, 30), x: here.map((item) => names.indexOf(item.layer)),
            y: estimate.map(([middle]) => middle), line: {color: shade, width: 1}, marker: {color: shade, size: 9, symbol: SHAPES[number % SHAPES.length]},
            error_y: {type: "data", symmetric: false, color: shade,
              array: estimate.map(([middle, , high]) => high === null ? 0 : high - middle), arrayminus: estimate.map(([middle, low]) => low === null ? 0 : middle - low)},
            customdata: here.map((item) => escaped(item.layer)), hovertemplate: "%{customdata}: %{y:.4g}<extra></extra>",
          };
        }), () => ({
          height: 320, yaxis: {title: {text: first + (factor === 100 ? ", %" : "")}}, showlegend: sets.length > 1,
          legend: {orientation: "h", y: 1.15}, xaxis: {tickvals: names.map((_, i) => i), ticktext: names.map((text) => escaped(text, 20))},
        }));
      }
      table(part, `Results by layer, ${protocol}`, [
        ["Data set", "text", (item) => item.data_set],
        ["Layer", "text", (item) => item.layer],
        ["Width", "number", (item) => item.width, (item) => count(item.width)],
        ...metrics.map((metric, i) => [metric, "number", (item) => (item.metrics[metric] || [null])[0], (item) => {
          const [middle, low, high] = item.metrics[metric] || [null, null, null];
          return middle === null ? null : value(metric, middle) + (i === 0 && low !== null ? ` (${value(metric, low)} to ${value(metric, high)})` : "");
        }]),
        ["Chosen", "text", (item) => item.chosen],
        ["Train rows", "number", (item) => item.train, (item) => count(item.train)],
        ["Test rows", "number", (item) => item.test, (item) => count(item.test)],
      ], probed);
    }
  };

  const other = () => {
    if (!content.other) return;
    const {name: title, changes, images, features, neighbours: shared, compared, k} = content.other;
    const part = section("Compared with another data set");
    name(add(part, "p"), title);
    add(part, "p", `Images, matched by their bytes: ${count(images.in_both)} in both, ${count(images.only_in_first)} only in this data set, ${count(images.only_in_second)} only in the other.`);
    if (changes.length)
      table(part, "Settings that the features depend on", [["Setting", "text", (item) => item[0]], ["This data set", "text", (item) => item[1]], ["The other", "text", (item) => item[2]]], changes);
    else add(part, "p", "Both have the same fingerprint.");
    add(part, "h3", "Features of the images in both");
    table(part, "Features of the images in both", [
      ["Layer", "text", (item) => item.name],
      ["Minimum cosine", "number", (item) => item.least, (item) => item.least === undefined ? null : item.least.toFixed(6)],
      ["Median", "number", (item) => item.median, (item) => item.median === undefined ? null : item.median.toFixed(6)],
      ["Largest difference, relative", "number", (item) => item.deviation, (item) => item.deviation === undefined ? null : short(item.deviation)],
      ["Not compared because", "text", (item) => item.not_compared || ""],
    ], features);
    if (!shared.length) return;
    add(part, "h3", "Neighbours that are the same");
    add(part, "p", `The share of the ${k} nearest images that is the same in both data sets, among ${count(compared)} images that are in both.`);
    table(part, "Shared neighbours", [
      ["Layer (this | other)", "text", (item) => item[0]],
      ["Same", "number", (item) => item[1], (item) => percent(item[1])],
      ["By chance", "number", (item) => item[2], (item) => percent(item[2])],
    ], shared);
  };

  overview();
  failures();
  map();
  neighbours();
  duplicates();
  layers();
  probes();
  other();
  classTable();
  time();
  document.documentElement.dataset.ready = "yes";
})();
