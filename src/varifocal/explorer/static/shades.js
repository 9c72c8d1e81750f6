// Shades are classes of the style sheet: shade-gate-0 (global) to shade-gate-10 (local), and shade-amount-0 to 6.

const READ_STEPS = [0.0005, 0.002, 0.01, 0.03, 0.1, 0.3];

export function gateShade(gate, decides) {
  return decides ? `shade-gate-${Math.round(gate * 10)}` : "shade-silent";
}

/** The shade of a weight between 0 and 1; each step is about three times the one before. */
export function readShade(weight) {
  return `shade-amount-${READ_STEPS.filter((step) => weight >= step).length}`;
}

/** The shade of a width between the narrowest and the widest of the text. */
export function widthShade(width, least, most) {
  return `shade-amount-${most > least ? Math.round(((width - least) / (most - least)) * 6) : 3}`;
}

export function percent(share) {
  if (share >= 0.1) return `${(share * 100).toFixed(0)}\u00a0%`;
  if (share >= 0.0095) return `${(share * 100).toFixed(1)}\u00a0%`;
  return share >= 0.00005 ? `${(share * 100).toFixed(2)}\u00a0%` : "0\u00a0%";
}

/** Fills a legend with words and shades; shades are given as classes. */
export function showLegend(root, entries) {
  root.replaceChildren(
    ...entries.map(({ words, shade }) => {
      const entry = document.createElement("span");
      if (shade) {
        entry.append(document.createElement("i"));
        entry.firstChild.className = shade;
      }
      if (words) {
        const label = document.createElement("b");
        label.textContent = words;
        entry.append(label);
      }
      return entry;
    }),
  );
}

export function legendOf(colour, view) {
  const shades = (kind, steps) => steps.map((step) => ({ shade: `shade-${kind}-${step}` }));
  const amounts = shades("amount", [0, 1, 2, 3, 4, 5, 6]);
  if (colour === "gate") {
    const gates = shades("gate", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    const silent = { shade: "shade-silent", words: "decides nothing: both branches read the same keys" };
    return [{ words: "global 0" }, ...gates, { words: "1 local" }, silent];
  }
  if (colour === "width") {
    const [least, most] = extremes(view.width).map(Math.round);
    return [{ words: `window of ${least}` }, ...amounts, { words: `${most} keys` }];
  }
  return [{ words: "reads under 0.05 %" }, ...amounts, { words: "over 30 %" }];
}

export function extremes(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}
