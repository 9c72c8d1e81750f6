// Shades are classes of the style sheet: shade-gate-0 (global) to shade-gate-10 (local), and shade-amount-0 to 6.

const READ_STEPS = [0.0005, 0.002, 0.01, 0.03, 0.1, 0.3];

export function gateShade(gate, decides) {
  return decides ? `shade-gate-${Math.round(gate * 10)}` : "shade-silent";
}

/** Shade of a weight between 0 and 1, in steps of about three. */
export function readShade(weight) {
  return `shade-amount-${READ_STEPS.filter((step) => weight >= step).length}`;
}

/** Shade of a width between the least and the most of the text. */
export function widthShade(width, least, most) {
  return `shade-amount-${most > least ? Math.round(((width - least) / (most - least)) * 6) : 3}`;
}

export function percent(share) {
  if (share >= 0.1) return `${(share * 100).toFixed(0)} %`;
  if (share >= 0.0095) return `${(share * 100).toFixed(1)} %`;
  return share >= 0.00005 ? `${(share * 100).toFixed(2)} %` : "0 %";
}

/** Fills a legend: [[class, label], ...]. */
export function showLegend(root, entries) {
  root.replaceChildren(
    ...entries.map(([shade, label]) => {
      const entry = document.createElement("span");
      entry.className = "entry";
      const swatch = document.createElement("i");
      swatch.className = shade;
      entry.append(swatch);
      if (label !== "") {
        const words = document.createElement("b");
        words.textContent = label;
        entry.append(words);
      }
      return entry;
    }),
  );
}

export function legendOf(colour, view) {
  if (colour === "gate") {
    const words = { 0: "0: global", 5: "½", 10: "1: local" };
    const entries = [0, 2, 4, 5, 6, 8, 10].map((step) => [`shade-gate-${step}`, words[step] ?? ""]);
    return [...entries, ["shade-silent", "decides nothing: both branches read the same keys"]];
  }
  if (colour === "width") {
    const [least, most] = extremes(view.width);
    return [0, 3, 6].map((step) => [`shade-amount-${step}`, `${Math.round(least + ((most - least) * step) / 6)} keys`]);
  }
  const labels = ["under 0.05 %", "", "1 %", "", "10 %", "", "over 30 %"];
  return ["shade-amount-0", ...READ_STEPS.map((_, step) => `shade-amount-${step + 1}`)].map((shade, step) => [
    shade,
    labels[step],
  ]);
}

export function extremes(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}
