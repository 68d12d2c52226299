// The sections of the page, most useful first: verdict, map, findings, probes, neighbours; provenance is folded.

const METRICS = {
  top1: "Top-1", top5: "Top-5", balanced_accuracy: "Balanced", macro_f1: "Macro F1", log_loss: "Log loss",
  calibration_error: "ECE", r2: "R²", rmse: "RMSE", mae: "MAE", map: "Mean AP",
  mIoU: "Mean IoU", pixel_accuracy: "Pixels", mean_accuracy: "Mean of classes", delta1: "Delta1", abs_rel: "Abs. rel.",
};
const SHARES = ["top1", "top5", "balanced_accuracy", "mIoU", "pixel_accuracy", "mean_accuracy", "delta1"];
const CALIBRATED = "calibration_error_if_calibrated"; // stands beside the calibration error
const baseOf = (metric) => metric.split("@")[0];
const metricName = (metric) => {
  const [base, shots] = metric.split("@");
  return (METRICS[base] || base.replace(/_/g, " ")) + (shots ? `, ${shots} per class` : "");
};
const metricValue = (metric, number) =>
  number === null || number === undefined ? null : SHARES.includes(baseOf(metric)) ? percent(number) :
    Math.abs(number) < 100 ? number.toFixed(3) : short(number);
const interval = (metric, [, low, high]) => {
  if (low === null || high === null || low === undefined) return "";
  const isShare = SHARES.includes(baseOf(metric)); // the unit stands behind the value
  return isShare ? ` (${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)})` : ` (${short(low)} to ${short(high)})`;
};

const CONFUSIONS = 30; // classes up to which the matrix is shown, and confusions listed
const CLASS_BARS = 30; // classes up to which sizes are shown as bars

// Verdict

const sizesDiffer = () => {
  const sizes = content.classes.map(([, all]) => all);
  return sizes.length > 1 && Math.max(...sizes) > 1.1 * Math.min(...sizes);
};
const bestProbe = () => {
  const all = content.probes.flatMap((probe) => probe.layers.map((layer) => ({probe, layer, metric: probe.metrics[0]})))
    .filter(({layer, metric}) => layer.metrics[metric] && layer.metrics[metric][0] !== null);
  const shown = content.predictions.name;
  return all.find(({probe, layer}) => probe.name === shown && layer.layer === content.predictions.layer) || all[0];
};
// The findings: kind -> [title, what is found as words, what the section says]
const KINDS = {
  "failed": ["Images without features", (n) => `${plural(n, "image")} ${n === 1 ? "has" : "have"} no features`, ""],
  "copy across splits": ["Copies across splits", (n, groups) => `${plural(groups, "image")} ${groups === 1 ? "is" : "are"} in several splits`,
    "The bytes are the same. A probe that learned an image is not tested by its copy."],
  "copy": ["Copies", (n, groups) => `${plural(groups, "image")} ${groups === 1 ? "occurs" : "occur"} more than once`, "The bytes are the same."],
  "near-duplicate": ["Near-duplicates", (n, groups) => plural(groups, "group of near-duplicates", "groups of near-duplicates"), ""],
  "suspect label": ["Suspect labels", (n) => plural(n, "suspect label"),
    "A probe that has not seen the image is confident of another class. The least credible labels come first; many others are right."],
  "outlier": ["Outliers", (n) => plural(n, "outlier"), ""],
};
const {findings} = content;
const findingsOf = (kind) => findings.listed.filter(([its]) => its === kind);
const anchorOf = (kind) => `finding-${kind.replace(/ /g, "-")}`;
const across = (kind) => [[findings.in_splits[kind], "splits"], [findings.in_classes[kind], "classes"]]
  .filter(([number]) => number && kind !== "copy across splits").map(([number, what]) => `, ${count(number)} across ${what}`).join("");
const oddities = () => {
  const odd = Object.entries(KINDS).filter(([kind]) => findings.counts[kind])
    .map(([kind, [, words]]) => [words(findings.counts[kind], findings.groups[kind]) + across(kind), anchorOf(kind)]);
  if (content.classes.length > 1 && content.unlabelled) odd.push([`${plural(content.unlabelled, "image")} without a class`, "classes"]);
  for (const layer of content.layers)
    if (content.counts.good > 1 && layer.constant > layer.width / 10)
      odd.push([`${percent(layer.constant / layer.width)} of the values of ${layer.name} are the same for all images`, "provenance"]);
  return odd;
};

const addVerdict = () => {
  const part = add(main, "div", null, {class: "verdict"}), addTile = addHead("report", part);
  const {rows, classes} = content.counts, labelled = rows - content.unlabelled, layers = content.layers.length;
  addTile(count(rows), rows === 1 ? "image" : "images");
  if (!labelled) addTile("no", "labels");
  else addTile(count(classes), (classes === 1 ? "class" : "classes") + (labelled < rows ? `; ${count(labelled)} images have a label` : ""));
  addTile(count(layers), layers === 1 ? "layer" : "layers");
  const best = bestProbe();
  if (best) {
    const estimate = best.layer.metrics[best.metric];
    addTile(metricValue(best.metric, estimate[0]), `${metricName(best.metric)} of a probe of ${best.layer.layer}${interval(best.metric, estimate)}`);
  }
  if (byClass)
    addTile(percent(content.alike.same_class), `of the ${content.alike.k} nearest images have the same class; by chance ${percent(content.alike.by_chance)}`);
  const odd = oddities(), text = add(part, "p", content.backbone ? `Features of ${content.backbone}. ` : "Features that a program wrote. ");
  text.append(odd.length ? "Odd: " : `Nothing odd was found: no failures, copies, near-duplicates${labelled ? ", outliers or suspect labels" : " or outliers"}.`);
  odd.forEach(([words, anchor], i) => {
    add(text, "a", words, {href: `#${anchor}`});
    text.append(i < odd.length - 1 ? "; " : ".");
  });
};

// Probes

const addProbes = () => {
  if (!content.probes.length) return;
  const part = addSection("Linear probes");
  for (const {name: title, protocol, metrics, complete, layers} of content.probes) {
    add(part, "h3", `${protocol} (${title})`);
    if (!complete) add(part, "p", "This probe did not finish.", {class: "note"});
    const metric = metrics[0], factor = SHARES.includes(baseOf(metric)) ? 100 : 1;
    const estimates = (item) => (item.metrics[metric] || [null, null, null]).map((end) => end === null ? null : factor * end);
    if (layers.length > 1) {
      const names = [...new Set(layers.map((item) => item.layer))], sets = [...new Set(layers.map((item) => item.data_set))];
      addEstimates(part, `${metricName(metric)} by layer`, metricName(metric) + (factor === 100 ? ", %" : ""), names,
        sets.map((set) => [set, new Map(layers.filter((item) => item.data_set === set).map((item) => [item.layer, estimates(item)]))]));
    }
    const several = new Set(layers.map((item) => item.data_set)).size > 1;
    addTable(part, `Results by layer, ${protocol}`, [
      ...(several ? [["Data set", "text", (item) => item.data_set]] : []),
      ["Layer", "text", (item) => item.layer],
      ...metrics.filter((key) => key !== CALIBRATED).map((key, i) => [metricName(key), "number", (item) => (item.metrics[key] || [null])[0], (item) => {
        const estimate = item.metrics[key] || [null, null, null];
        const calibrated = key === "calibration_error" ? metricValue(CALIBRATED, (item.metrics[CALIBRATED] || [null])[0]) : null;
        return estimate[0] === null ? null : metricValue(key, estimate[0]) + (i === 0 ? interval(key, estimate) : "") +
          (calibrated === null ? "" : ` (${calibrated} if calibrated)`);
      }]),
      ["Chosen", "text", (item) => item.chosen],
      ["Train", "number", (item) => item.train, (item) => count(item.train)],
      ["Test", "number", (item) => item.test, (item) => count(item.test)],
    ], layers);
  }
  addPredictions(part);
};

const addPredictions = (part) => {
  const {name: title, protocol, layer: layerName, tested, wrong, n_wrong: all} = content.predictions;
  if (!tested) return;
  const probe = content.probes.find((item) => item.name === title);
  const layer = probe.layers.find((item) => item.layer === layerName);
  add(part, "h3", `Where ${protocol} of ${layerName} is wrong`);
  const list = add(part, "div");
  const showWrong = (rows, caption) => {
    list.replaceChildren();
    add(list, "p", caption);
    const strip = add(list, "ul", null, {class: "strip"});
    for (const row of rows.slice(0, 60)) {
      const [label, predicted, probability] = predictionOf(row);
      addCard(strip, row, [], {kind: "prediction"});
      const line = add(strip.lastChild, "div", `✗ ${predicted}${certainty(probability)}`, {class: "predicted"});
      line.title = `class ${label}, predicted ${predicted}`;
    }
  };
  const certain = wrong.some((row) => predictionOf(row)[2] !== null);
  const showAll = () => showWrong(wrong, `${count(all)} of ${count(tested)} test images are misclassified` +
    (all > Math.min(60, wrong.length) ? `; ${Math.min(60, wrong.length)} of them are shown` : "") + (certain ? ", the most confident first." : "."));
  if (layer.confusion && layer.classes.length <= CONFUSIONS) {
    const {classes, confusion} = layer;
    const scroll = addSideways(part, "div", {class: "scroll confusion", role: "region", "aria-label": "Confusion matrix"});
    const table = add(scroll, "table");
    add(table, "caption", "Test images by true class (rows) and predicted class (columns). Choose a cell to see its images.");
    const head = add(add(table, "thead"), "tr");
    add(head, "td");
    for (const text of classes) addName(add(head, "th", null, {scope: "col"}), text);
    const body = add(table, "tbody");
    classes.forEach((text, i) => {
      const line = add(body, "tr"), total = confusion[i].reduce((sum, number) => sum + number, 0);
      addName(add(line, "th", null, {scope: "row"}), text);
      confusion[i].forEach((number, j) => {
        const cell = add(line, "td", i === j || !number ? count(number) : null, {class: i === j ? "diagonal" : number ? "off" : "zero"});
        cell.style.setProperty("--share", total ? number / total : 0);
        if (i === j || !number) return;
        addButton(cell, count(number), () => {
          const rows = wrong.filter((row) => predictionOf(row)[0] === text && predictionOf(row)[1] === classes[j]);
          showWrong(rows, `${count(number)} of ${count(total)} test images of ${text} are taken for ${classes[j]}.`);
          list.scrollIntoView({block: "nearest"});
        }, {"aria-label": `${text} taken for ${classes[j]}: ${number}`});
      });
    });
  } else if (layer.confusion) {
    const pairs = layer.confusion.flatMap((line, i) => line.map((number, j) => [i, j, number])).filter(([i, j, number]) => i !== j && number);
    addTable(part, `The ${CONFUSIONS} most frequent confusions`, [
      ["Class", "text", ([i]) => layer.classes[i]], ["Taken for", "text", ([, j]) => layer.classes[j]],
      ["Images", "number", ([, , number]) => number, ([, , number]) => count(number)],
    ], pairs.sort((a, b) => b[2] - a[2]).slice(0, CONFUSIONS));
  }
  part.append(list);
  showAll();
};

// Neighbours

const addNeighbourSection = () => {
  if (!content.alike) return;
  const {k, among, queries, gallery, by_class: classes} = content.alike;
  const part = addSection("Neighbours");
  add(part, "p", `Images are compared by the cosine of their ${content.layer}: 1 is the same direction. Of images with the same bytes, only the first is compared.`);
  if (queries < among)
    add(part, "p", `Neighbours of ${count(queries)} randomly drawn images were searched among all ${count(among)}; near-duplicates and outliers are of these ${count(queries)} images only. layertap findings searches all.`);
  if (byClass && classes.length > 1)
    addTable(part, `How many of the ${k} nearest images have the same class`, [
      ["Class", "text", (item) => className(item.label)],
      ["Same class", "number", (item) => item.same, (item) => percent(item.same)],
      ["Most frequent other class", "text", (item) => className(item.other)],
      ["Its share", "number", (item) => item.other_share, (item) => item.other < 0 ? null : percent(item.other_share)],
    ], [...classes].sort((a, b) => a.same - b.same));
  if (!gallery.length) return;
  add(part, "h3", !byClass ? "Randomly drawn images" : classes.length > gallery.length ? "Most central images of the largest classes" : "The most central image of each class");
  for (const {row, hits} of gallery) addNeighbours(part, row, hits.map(([hit, near]) => [hit, near.toFixed(3)]));
};

// Findings

const FIRST = 24; // cards and groups of a kind
const addKind = (part, kind) => {
  const [title, , about] = KINDS[kind], rows = findingsOf(kind), all = findings.counts[kind];
  if (!all) return;
  add(part, "h3", title, {id: anchorOf(kind)});
  const isGroup = rows[0][5] !== null, units = isGroup ? new Set(rows.map((row) => row[5])).size : rows.length;
  const inAll = isGroup ? findings.groups[kind] : all, shown = Math.min(units, FIRST);
  add(part, "p", [about, kind === "failed" || kind.startsWith("copy") ? "" : `Score: ${rows[0][4].replace("; the labels differ", "")}.`,
    isGroup ? `${plural(all, "image")} in ${plural(inAll, "group")}${across(kind)}.` : `${plural(all, "image")}.`,
    inAll > shown ? `The first ${shown} are shown; the table below names ${rows.length < all ? `the first ${count(rows.length)}` : "all"}.` : ""].filter(Boolean).join(" "));
  if (kind === "failed") {
    const pictures = rows.filter(([, row]) => tileOf(row));
    if (pictures.length) add(part, "p", "These images can be decoded in part. The part is shown here, but has no features.", {class: "quiet"});
    const strip = add(part, "ul", null, {class: "strip"});
    for (const [, row] of pictures.slice(0, FIRST)) addCard(strip, row, []);
    addTable(part, "Images without features", [["Row", "number", ([, row]) => rowOf(row)[3]], ["Path", "text", ([, row]) => pathOf(row)], ["Reason", "text", (row) => row[4]]], rows);
    return;
  }
  const strip = add(part, "ul", null, {class: isGroup ? "strip groups" : "strip"});
  if (!isGroup) {
    for (const [, row, , score, , , , suggested] of rows.slice(0, FIRST)) addCard(strip, row, [score.toFixed(3)], {suggested});
    return;
  }
  const groups = new Map();
  for (const row of rows) groups.set(row[5], [...groups.get(row[5]) || [], row]);
  for (const members of [...groups.values()].slice(0, FIRST)) {
    const element = add(strip, "li", null, {class: "pair"}), several = (valueOf) => new Set(members.map(([, row]) => valueOf(row))).size > 1;
    add(element, "p", (kind.startsWith("copy") ? `${count(members.length)} copies` : `cosine ${Math.max(...members.map((row) => row[3])).toFixed(4)}`) +
      (several(labelOf) ? ", in several classes" : "") + (several(splitOf) ? ", in several splits" : ""));
    const list = add(element, "ul", null, {class: "strip"});
    for (const [, row, , , , , keep] of members.slice(0, kind.startsWith("copy") ? 1 : 4)) addCard(list, row, keep ? ["keep"] : []);
    const others = members.slice(kind.startsWith("copy") ? 1 : 4), names = add(element, "p", null, {class: "quiet"});
    for (const [, row] of others.slice(0, 8)) {
      addName(names, shortPath(row)).title = pathOf(row);
      if (several(labelOf)) { names.append(" ["); addName(names, className(labelOf(row)) || "no class"); names.append("]"); }
      names.append(" ");
    }
    if (others.length > 8) names.append(`and ${count(others.length - 8)} more`);
  }
};
const addFindings = () => {
  const part = addSection("Findings"), {alike} = content;
  const all = Object.values(findings.counts).reduce((sum, number) => sum + number, 0);
  for (const kind of Object.keys(KINDS)) addKind(part, kind);
  if (alike) {
    const few = alike.threshold === null;
    add(part, "p", (few ? "Too few images to tell which are unusually near or far. " :
      `Near-duplicates have a cosine of at least ${alike.threshold.toFixed(4)}, half as far as usual or nearer. `) +
      (few || alike.outliers_below === null ? "" : `Outliers have a cosine below ${alike.outliers_below.toFixed(4)} to their neighbour ${alike.k}: a modified z-score above 3.5. ` +
        (findings.counts.outlier ? "" : "No image is that far from the others.")), {class: "quiet"});
    if (alike.counts.some((item) => item))
      addHistogram(add(part, "div", null, {class: "plots"}), "Cosine of each image and its nearest image", "cosine", alike.counts, alike.edges, few ? null : [alike.threshold, "near-duplicates from here"]);
  }
  if (!all) return;
  const controls = add(part, "div", null, {class: "controls"});
  addButton(controls, "Save findings as CSV", () => savedAs("findings.csv", Uint8Array.from(atob(findings.csv), (character) => character.charCodeAt(0)), "text/csv"));
  add(controls, "span", `${plural(all, "finding")}${findings.saved < all ? `, of which ${count(findings.saved)} are saved` : ""}. layertap findings -o FILE writes all.`, {class: "quiet"});
  addTable(addFolded(part, "All findings in a table"), "All findings", [
    ["Kind", "text", (row) => row[0]], ["Path", "text", (row) => pathOf(row[1])], ["Score", "number", (row) => row[3], (row) => row[3] === null ? null : row[3].toFixed(4)],
    ["Class", "text", (row) => className(labelOf(row[1]))], ["Suggested", "text", (row) => row[7]],
    ["Other image", "text", (row) => row[2] === null ? "" : pathOf(row[2])], ["Group", "number", (row) => row[5]],
    ["Keep", "text", (row) => row[6] === null ? "" : row[6] ? "yes" : "no"], ["Meaning", "text", (row) => row[4]],
  ], findings.listed);
};

const addClasses = () => {
  if (!content.classes.length) return;
  const part = addSection("Classes", "classes");
  const sizes = content.classes.map(([, all]) => all);
  const unlabelled = content.unlabelled ? ` ${plural(content.unlabelled, "image")} ${content.unlabelled === 1 ? "has" : "have"} no class.` : "";
  if (!sizesDiffer() && content.classes.every(([, all, good]) => all === good)) {
    add(part, "p", `${plural(content.counts.classes, "class", "classes")} of ${Math.min(...sizes) === Math.max(...sizes) ? count(sizes[0]) : `${count(Math.min(...sizes))} to ${count(Math.max(...sizes))}`} images each.${unlabelled}`);
    return;
  }
  add(part, "p", `${plural(content.counts.classes, "class", "classes")}, of ${count(Math.min(...sizes))} to ${count(Math.max(...sizes))} images.${unlabelled}`);
  if (content.classes.length > 1 && content.classes.length <= CLASS_BARS) {
    const bars = add(part, "div", null, {class: "bars", "aria-hidden": "true"});
    for (const [text, all] of content.classes) {
      addName(bars, text);
      add(add(bars, "span"), "i").style.width = `${100 * all / Math.max(...sizes)}%`;
    }
  }
  addTable(part, "Images of each class", [
    ["Class", "text", (item) => item[0]],
    ["Images", "number", (item) => item[1], (item) => count(item[1])],
    ["With features", "number", (item) => item[2], (item) => count(item[2])],
  ], content.classes);
};

// Provenance

const addFolded = (parent, title) => {
  const details = add(parent, "details");
  add(details, "summary", title);
  return add(details, "div");
};
const addLayers = (part) => {
  add(part, "p", "Statistics of all values of the rows with features. The length of a row is its Euclidean norm.");
  addTable(part, "Statistics by layer", [
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
    ["Median length (min to max)", "number", (item) => item.lengths[1], (item) => item.lengths[1] === null ? null : `${short(item.lengths[1])} (${short(item.lengths[0])} to ${short(item.lengths[2])})`],
  ], content.layers);
  const drawn = content.layers.filter((item) => item.counts.length && item.lengths[0] < item.lengths[2]);
  if (!drawn.length) return;
  add(part, "h3", "Lengths of rows");
  if (drawn.length > 12) add(part, "p", `The last 12 of ${drawn.length} layers are shown.`, {class: "quiet"});
  const grid = add(part, "div", null, {class: "plots"});
  for (const item of drawn.slice(-12)) addHistogram(grid, item.name, "length", item.counts, item.edges);
};
const addProvenance = () => {
  const part = addSection("Where it comes from", "provenance");
  if (content.about_thumbnails) add(part, "p", content.about_thumbnails, {class: "quiet"});
  add(addFolded(part, "Images, backbone and settings"), "pre", content.description.join("\n"));
  addLayers(addFolded(part, `Statistics of ${plural(content.layers.length, "layer")}`));
};

addVerdict();
addMap();
addFindings();
addProbes();
addNeighbourSection();
addClasses();
addProvenance();
matchMedia("print").addEventListener("change", (event) => {
  if (event.matches) for (const details of document.querySelectorAll("details")) details.open = true;
});
document.documentElement.dataset.ready = "yes";
