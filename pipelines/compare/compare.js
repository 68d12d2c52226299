// The sections of the page of a comparison: verdict, table, accuracy against speed, layers, similarity, images in dispute.

const compared = content.backbones.filter((item) => !item.error), {tasks} = content;
const only = tasks.length === 1 ? tasks[0] : null; // with several tasks, backbones are compared by their average rank
const shade = (name) => `var(--class-${compared.findIndex((item) => item.name === name) % 10})`;
const share = (number) => number === null ? null : (100 * number).toFixed(1) + " %";
const between = ({low, high}) => low === null ? "" : ` (${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)})`;
const MEASURES = {
  cka: "Linear CKA", procrustes: "Procrustes", mutual_knn: "Mutual nearest neighbours", rsa: "RSA",
};

const addKey = (parent, names) => {
  const key = add(parent, "p", null, {class: "quiet"});
  for (const name of names) {
    add(key, "span", null, {class: "swatch"}).style.background = shade(name);
    addName(key, name);
    key.append("  ");
  }
};

const addVerdict = () => {
  const part = add(main, "div", null, {class: "verdict"}), addTile = addHead("comparison", part);
  addTile(count(content.images), "images");
  addTile(count(compared.length), compared.length === 1 ? "backbone" : "backbones");
  if (!tasks.length) return;
  const [best, ...others] = compared;
  if (only) addTile(share(best.value), `${only.metric_name} of ${best.name}, ${best.layer}${between(best)}`);
  else addTile(best.rank.toFixed(2), `average rank of ${best.name} in ${tasks.length} tasks`);
  const same = others.filter((item) => item.distinguishable === false).map((item) => item.name);
  const chosenOn = [...new Set(tasks.map((task) => task.layers_chosen_on))].filter(Boolean);
  add(part, "p", (same.length ? `Not distinguishable from ${best.name}: ${same.join(", ")}. ` :
    others.length ? `${best.name} is distinguishable from all others. ` : "") +
    `${only ? count(only.test_images) + " test images, p" : "P"}rotocol ${content.protocol}. ` +
    chosenOn.map((images) => `Layers are chosen on ${images}. `).join("") +
    (!others.length ? "" : only ? "Differences are tested by McNemar's exact test, corrected for all pairs by Holm; below 0.05 they are distinguishable." :
      `Average ranks that differ by more than ${content.critical_difference.toFixed(2)} are distinguishable (Nemenyi's test, 0.05, corrected for all pairs).`));
};

const addTableOfBackbones = () => {
  const part = addSection("Backbones");
  const number = (title, key, shown) => [title, "number", (item) => item[key], (item) => item[key] === null ? null : shown(item[key], item)];
  addTable(part, "Backbones, best first", [
    ["Backbone", "text", (item) => item.name],
    ["Layer", "text", (item) => item.layer],
    ...(only ? [
      number(only.metric_name, "value", (value, item) => share(value) + between(item)),
      number("Behind", "behind", (value) => (100 * value).toFixed(1)),
    ] : tasks.length ? [number("Average rank", "rank", (value) => value.toFixed(2))] : []),
    ...(tasks.length ? [
      number("p", "p", (value) => value < 0.001 ? "below 0.001" : value.toFixed(3)),
      ["Difference", "text", (item) => item.distinguishable === null ? "best" : item.distinguishable ? "distinguishable" : "not distinguishable"],
    ] : []),
    ...(only ? [] : tasks.map((task) => [task.name, "number", (item) => task.scores[item.name].value,
      (item) => share(task.scores[item.name].value) + between(task.scores[item.name])])),
    number("Images/s", "images_per_s", (value) => value.toFixed(value < 10 ? 1 : 0)),
    number("Hours for 1 M", "images_per_s", (value) => (1e6 / value / 3600).toFixed(1)),
    number("Parameters", "parameters", (value) => (value / 1e6).toFixed(1) + " M"),
    number("Values", "width", count),
    number("Bytes", "row_bytes", count),
    number("Effective rank", "effective_rank", (value) => value.toFixed(1)),
    number("Alignment", "alignment", (value) => value.toFixed(2)),
    ["Licence", "text", (item) => item.licence],
    ["Weights", "text", (item) => item.weights],
  ], compared);
  const failed = content.backbones.filter((item) => item.error);
  if (failed.length) addTable(part, "Left out", [["Backbone", "text", (item) => item.name], ["Reason", "text", (item) => item.error]], failed);
};

const addSpeed = () => {
  const timed = compared.filter((item) => tasks.length && item.images_per_s);
  if (timed.length < 2) return;
  const part = addSection(only ? "Accuracy and speed" : "Rank and speed");
  const rate = (item) => Math.log10(item.images_per_s), value = (item) => only ? 100 * item.value : -item.rank;
  const shown = (item) => only ? share(item.value) : `average rank ${item.rank.toFixed(2)}`;
  const range = (item) => only && item.low !== null ? [100 * item.low, 100 * item.high] : [value(item), value(item)];
  const rates = timed.map(rate), low = Math.min(...rates), high = Math.max(...rates), margin = 0.15 * (high - low) || 0.2;
  const values = timed.flatMap((item) => [value(item), ...range(item)]), spare = only ? 0.06 * (Math.max(...values) - Math.min(...values)) || 1 : 0.3;
  const steps = [1, 2, 5].flatMap((first) => [-1, 0, 1, 2, 3, 4, 5].map((power) => first * 10 ** power)).sort((a, b) => a - b);
  const axes = {
    x: [low - margin, high + margin], y: [Math.min(...values) - spare, Math.max(...values) + spare], height: 340,
    xTitle: "images/s of the forward on this machine, log scale",
    yTitle: only ? `${only.metric_name}, %` : `average rank in ${tasks.length} tasks`, yText: only ? undefined : (number) => short(-number),
    xTicks: steps.map((step) => [Math.log10(step), short(step)]).filter(([place]) => place >= low - margin && place <= high + margin),
  };
  const beaten = (item) => timed.some((other) => other !== item && other.images_per_s >= item.images_per_s && value(other) >= value(item) &&
    (other.images_per_s > item.images_per_s || value(other) > value(item)));
  const front = timed.filter((item) => !beaten(item)).sort((a, b) => rate(a) - rate(b));
  addChart(part, `${only ? only.metric_name : "Average rank"} and images/s of ${timed.map((item) => item.name).join(", ")}`, axes, (svg, {x, y, box}) => {
    addSvg(svg, "polyline", {points: front.map((item) => `${x(rate(item))},${y(value(item))}`).join(" "), fill: "none", style: "stroke: var(--quiet); stroke-dasharray: 5 4"});
    const taken = timed.flatMap((item) => { // boxes of bars and points: left, top, right, bottom
      const across = x(rate(item)), [from, to] = range(item), at = y(value(item));
      return [[across - 2, y(to), across + 2, y(from)], [across - 8, at - 8, across + 8, at + 8]];
    });
    for (const item of timed) {
      const across = x(rate(item)), color = shade(item.name);
      const [from, to] = range(item);
      addSvg(svg, "line", {x1: across, x2: across, y1: y(from), y2: y(to), style: `stroke: ${color}; stroke-width: 2`});
      const point = addSvg(svg, "circle", {cx: across, cy: y(value(item)), r: 6, style: `fill: ${color}`});
      addSvg(point, "title", {}, `${item.name}: ${shown(item)}, ${short(item.images_per_s)} images/s`);
      addFreeText(svg, item.name, across, y(value(item)), box, taken);
    }
  });
  addKey(part, timed.map((item) => item.name));
  add(part, "p", "The dashed line joins the backbones that no other one beats in both." + (only ? " Bars are 95 % intervals." : ""), {class: "quiet"});
};

// A section with a part for each task that has something to show
const addSectionOfTasks = (title, about, hasContent, addPart) => {
  const shown = tasks.filter(hasContent);
  if (!shown.length) return;
  const part = addSection(title);
  if (about) add(part, "p", about);
  for (const task of shown) {
    if (!only) addName(add(part, "h3"), task.name);
    addPart(part, task);
  }
};

const addLayerCurves = (part, task) => {
  const byBackbone = compared.map((item) => [item.name, task.layers.filter((line) => line.backbone === item.name)]);
  const values = task.layers.map((line) => 100 * line.value), margin = (Math.max(...values) - Math.min(...values)) * 0.05 || 1;
  const axes = {
    x: [0, 1], y: [Math.min(...values) - margin, Math.max(...values) + margin], height: 320, xTitle: "layers, first to last",
    yTitle: `${task.metric_name}, %`, xTicks: [[0, "first"], [1, "last"]],
  };
  const depth = (i, lines) => lines.length < 2 ? 1 : i / (lines.length - 1);
  addChart(part, `${task.metric_name} by layer`, axes, (svg, {x, y}) => {
    for (const [name, lines] of byBackbone) {
      addSvg(svg, "polyline", {points: lines.map((line, i) => `${x(depth(i, lines))},${y(100 * line.value)}`).join(" "), fill: "none", style: `stroke: ${shade(name)}`});
      lines.forEach((line, i) => {
        const point = addSvg(svg, "circle", {cx: x(depth(i, lines)), cy: y(100 * line.value), r: 4, style: `fill: ${shade(name)}`});
        addSvg(point, "title", {}, `${name}, ${line.layer}: ${share(line.value)}`);
      });
    }
  });
  addKey(part, byBackbone.map(([name]) => name));
  addTable(part, "All layers", [
    ["Backbone", "text", (line) => line.backbone], ["Layer", "text", (line) => line.layer],
    [task.metric_name, "number", (line) => line.value, (line) => share(line.value) + between(line)],
    ["On validation", "number", (line) => line.chosen_by, (line) => share(line.chosen_by)],
  ], task.layers);
};

const addSimilarity = () => {
  const {alikeness: similarity} = content;
  if (!similarity || similarity.features.length < 2) return;
  const part = addSection("Similarity of the features");
  const controls = add(part, "div", null, {class: "controls"});
  const label = add(controls, "label", "Measure ");
  const choice = add(label, "select");
  for (const [key, text] of Object.entries(MEASURES)) add(choice, "option", text, {value: key});
  const about = add(part, "p", null, {class: "quiet"}), place = add(part, "div");
  const single = new Set(similarity.features.map(([, layer]) => layer)).size === 1;
  const names = similarity.features.map(([backbone, layer]) => single ? backbone : `${backbone}: ${layer}`);
  const show = () => {
    const key = choice.value;
    about.textContent = {
      cka: "Linear CKA with the unbiased estimator, of all images; 1: the same up to rotation and scale, 0: unrelated.",
      procrustes: "How well one feature can be rotated onto the other, of all images; 1: exactly.",
      mutual_knn: `Share of the ${similarity.k} nearest images that two features have in common, on ${count(similarity.mutual_knn_images)} images.`,
      rsa: `Rank correlation of the distances between all pairs of ${count(similarity.rsa_images)} images.`,
    }[key];
    place.replaceChildren();
    const scroll = addSideways(place, "div", {class: "scroll confusion", role: "region", "aria-label": MEASURES[key]});
    const table = add(scroll, "table");
    add(table, "caption", MEASURES[key]);
    const head = add(add(table, "thead"), "tr");
    add(head, "td");
    for (const name of names) addName(add(head, "th", null, {scope: "col"}), name);
    const body = add(table, "tbody");
    names.forEach((name, i) => {
      const line = add(body, "tr");
      addName(add(line, "th", null, {scope: "row"}), name);
      similarity[key][i].forEach((value) => {
        const cell = add(line, "td", value === null ? "–" : value.toFixed(2), {class: "diagonal"});
        cell.style.setProperty("--share", value === null ? 0 : Math.max(0, Math.min(1, value)));
      });
    });
  };
  choice.addEventListener("change", show);
  show();
};

const addDisputed = (part, task) => {
  const strip = add(part, "ul", null, {class: "strip"});
  for (const {row, label, predictions} of task.disputed) {
    const element = addCard(strip, row, [], {kind: "prediction disputed"});
    addName(add(element, "div", null, {class: "class"}), label);
    const byClass = new Map();
    for (const [name, predicted] of predictions) byClass.set(predicted, [...byClass.get(predicted) || [], name]);
    for (const [predicted, names] of [...byClass].sort(([, a], [, b]) => b.length - a.length)) {
      const line = add(element, "div", null, {class: predicted === label ? "right" : "wrong"});
      add(line, "span", predicted === label ? "✓ " : "✗ ", {role: "img", "aria-label": predicted === label ? "right: " : "wrong: "});
      line.append(`${predicted} `);
      add(line, "small", names.join(", "));
    }
  }
};

addVerdict();
addTableOfBackbones();
addSpeed();
addSectionOfTasks("Layers", "", (task) => task.layers.length > compared.length, addLayerCurves);
addSimilarity();
addSectionOfTasks(
  "Images on which backbones disagree most",
  ["Test images, by the share of pairs of backbones that predict different classes.", content.about_thumbnails].join(" "),
  (task) => task.disputed.length, addDisputed,
);
document.documentElement.dataset.ready = "yes";
