// What the chosen token reads from far back in every head of every layer; clicking a cell shows its head.

import { percent, readShade } from "./shades.js";

export function showFarMap(section, far, windows, near, now, go) {
  section.hidden = false;
  section.querySelector(".far-words").textContent =
    `Of what it reads, the share that is ${near} tokens back or more, without the first four tokens, on which heads rest. ` +
    (windows.some((layer) => layer.some((size) => size !== null)) ? "A dot is a head with a window: it cannot read there." : "");
  const head = document.createElement("tr");
  head.append(heading("layer", "col"), ...far[0].map((_, index) => heading(String(index), "col")));
  section.querySelector("thead").replaceChildren(head);
  section.querySelector("tbody").replaceChildren(
    ...far.map((shares, layer) => {
      const row = document.createElement("tr");
      row.append(heading(String(layer), "row"));
      shares.forEach((share, index) => {
        const windowed = windows[layer]?.[index] != null && share < 0.0005;
        const cell = document.createElement("td");
        const button = document.createElement("button");
        button.type = "button";
        button.className = windowed ? "shade-silent" : readShade(share);
        button.textContent = windowed ? "·" : percent(share);
        const words = windowed ? `window of ${windows[layer][index]} keys` : `${percent(share)} from far back`;
        button.setAttribute("aria-label", `layer ${layer}, head ${index}: ${words}`);
        if (layer === now.layer && index === now.head) button.setAttribute("aria-current", "true");
        button.addEventListener("click", () => go(layer, index));
        cell.append(button);
        row.append(cell);
      });
      return row;
    }),
  );
}

function heading(text, scope) {
  const made = document.createElement("th");
  made.scope = scope;
  made.textContent = text;
  return made;
}
