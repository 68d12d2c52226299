// Charts in SVG. Their colours are CSS variables, so they follow light and dark.

const SVG = "http://www.w3.org/2000/svg";
const addSvg = (parent, tag, attributes, text) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};

// About `wanted` round numbers between two numbers
const ticksOf = (low, high, wanted) => {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(10)));
  return ticks;
};

// A chart that is drawn again when its width changes: draw(svg, scales) with x and y as pixels of a value
const addChart = (parent, label, {x, y, xTitle, yTitle, xTicks, yText = short, height = 240}, draw) => {
  const frame = add(parent, "div", null, {class: "chart", role: "img", "aria-label": label});
  const redraw = () => {
    const width = Math.max(200, frame.clientWidth);
    const yTicks = ticksOf(y[0], y[1], height / 50);
    const longest = Math.max(...yTicks.map((value) => yText(value).length));
    const box = {left: 28 + 7 * longest, right: width - 12, top: 10, bottom: height - 44};
    const scales = {
      x: (value) => box.left + (box.right - box.left) * (x[1] > x[0] ? (value - x[0]) / (x[1] - x[0]) : 0.5),
      y: (value) => box.bottom - (box.bottom - box.top) * (y[1] > y[0] ? (value - y[0]) / (y[1] - y[0]) : 0.5),
      box,
    };
    const svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({width, height, viewBox: `0 0 ${width} ${height}`})) svg.setAttribute(name, value);
    for (const value of yTicks) {
      addSvg(svg, "line", {class: "grid", x1: box.left, x2: box.right, y1: scales.y(value), y2: scales.y(value)});
      addSvg(svg, "text", {class: "tick", x: box.left - 6, y: scales.y(value) + 4, "text-anchor": "end"}, yText(value));
    }
    const marks = xTicks || ticksOf(x[0], x[1], width / 90).map((value) => [value, short(value)]);
    const step = Math.max(1, Math.ceil(marks.length * 7 * Math.max(...marks.map(([, text]) => text.length)) / (box.right - box.left)));
    marks.forEach(([value, text], i) => {
      if (i % step === 0) addSvg(svg, "text", {class: "tick x", x: scales.x(value), y: box.bottom + 17, "text-anchor": "middle"}, text);
    });
    addSvg(svg, "text", {class: "axis", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle"}, xTitle);
    addSvg(svg, "text", {class: "axis", transform: `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle"}, yTitle);
    draw(svg, scales);
    frame.replaceChildren(svg);
  };
  new ResizeObserver(redraw).observe(frame);
  redraw();
};

// A name beside a point, at the first place that covers nothing of `taken`, boxes that grow by the name; else none
const addFreeText = (svg, text, x, y, box, taken) => {
  const wide = 6.4 * text.length + 4, tall = 14;
  for (const [right, up] of [[1, 1], [-1, 1], [1, 0], [-1, 0], [1, -1], [-1, -1], [1, 2], [-1, 2], [1, -2], [-1, -2]]) {
    const left = right > 0 ? x + 10 : x - 10 - wide, top = y - tall / 2 - up * tall, area = [left, top, left + wide, top + tall];
    if (area[0] < box.left || area[2] > box.right || area[1] < box.top || area[3] > box.bottom) continue;
    if (taken.some((other) => area[0] < other[2] && area[2] > other[0] && area[1] < other[3] && area[3] > other[1])) continue;
    addSvg(svg, "text", {class: "tick", x: left + 2, y: top + 11}, text);
    taken.push(area);
    return;
  }
};

// counts: of each bin; edges: of the bins; line: [value, text] of a vertical line, or null
const addHistogram = (parent, label, xTitle, counts, edges, line = null) => {
  const figure = add(parent, "figure");
  const ends = [edges[0], edges[edges.length - 1]];
  if (line) ends[1] = Math.max(ends[1], line[0]);
  addChart(figure, label, {x: ends, y: [0, 1.15 * Math.max(1, ...counts)], xTitle, yTitle: "images"}, (svg, {x, y, box}) => {
    counts.forEach((number, i) => {
      const bar = addSvg(svg, "rect", {
        class: "bar", x: x(edges[i]), y: y(number), width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), height: box.bottom - y(number),
      });
      addSvg(bar, "title", {}, `${plural(number, "image")} from ${short(edges[i])} to ${short(edges[i + 1])}`);
    });
    if (!line) return;
    addSvg(svg, "line", {class: "limit", x1: x(line[0]), x2: x(line[0]), y1: box.top, y2: box.bottom});
    const left = x(line[0]) > (box.left + box.right) / 2;
    addSvg(svg, "text", {class: "axis", x: x(line[0]) + (left ? -5 : 5), y: box.top + 12, "text-anchor": left ? "end" : "start"}, line[1]);
  });
  add(figure, "figcaption", label);
};

// Values with intervals by name; series: [name, Map of name -> [value, low, high]]
const addEstimates = (parent, label, yTitle, names, series) => {
  const all = series.flatMap(([, values]) => [...values.values()].flat()).filter((value) => value !== null);
  const margin = (Math.max(...all) - Math.min(...all)) * 0.05 || 1;
  const axes = {
    x: [-0.5, names.length - 0.5], y: [Math.min(...all) - margin, Math.max(...all) + margin], xTitle: "", yTitle, height: 300,
    xTicks: names.map((name, i) => [i, name.length > 20 ? "…" + name.slice(-19) : name]),
  };
  addChart(parent, label, axes, (svg, {x, y}) => {
    series.forEach(([, values], number) => {
      const places = names.map((name, i) => [i, values.get(name)]).filter(([, estimate]) => estimate && estimate[0] !== null);
      const shade = `var(--class-${number % 10})`;
      addSvg(svg, "polyline", {points: places.map(([i, [middle]]) => `${x(i)},${y(middle)}`).join(" "), fill: "none", style: `stroke: ${shade}`});
      for (const [i, [middle, low, high]] of places) {
        if (low !== null && high !== null) addSvg(svg, "line", {x1: x(i), x2: x(i), y1: y(low), y2: y(high), style: `stroke: ${shade}; stroke-width: 2`});
        const point = addSvg(svg, "circle", {cx: x(i), cy: y(middle), r: 5, style: `fill: ${shade}`});
        addSvg(point, "title", {}, `${names[i]}: ${short(middle)}`);
      }
    });
  });
  if (series.length < 2) return;
  const key = add(parent, "p", null, {class: "quiet"});
  series.forEach(([name], number) => {
    add(key, "span", null, {class: "swatch"}).style.background = `var(--class-${number % 10})`;
    addName(key, name);
    key.append("  ");
  });
};
