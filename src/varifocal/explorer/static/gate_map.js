// The mean gate of every head in every layer; clicking a cell shows its head.

import { gateShade } from "./shades.js";

export function showGateMap(section, map, heads, now, go) {
  section.hidden = map.every((layer) => layer === null);
  if (section.hidden) return;
  const head = document.createElement("tr");
  head.append(heading("layer", "col"), ...Array.from({ length: heads }, (_, index) => heading(`head ${index}`, "col")));
  section.querySelector("thead").replaceChildren(head);
  section.querySelector("tbody").replaceChildren(
    ...map.map((gates, layer) => {
      const row = document.createElement("tr");
      row.append(heading(String(layer), "row"));
      for (let index = 0; index < heads; index += 1) {
        row.append(cell(gates?.[index] ?? null, layer, index, now, go));
      }
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

function cell(gate, layer, head, now, go) {
  const made = document.createElement("td");
  const button = document.createElement("button");
  const current = layer === now.layer && head === now.head;
  button.type = "button";
  button.className = gate === null ? "shade-silent" : gateShade(gate, true);
  button.textContent = gate === null ? "–" : gate.toFixed(2);
  button.setAttribute("aria-label", `layer ${layer}, head ${head}: ${gate === null ? "no gate decides" : gate.toFixed(2)}`);
  if (current) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => go(layer, head));
  made.append(button);
  return made;
}
