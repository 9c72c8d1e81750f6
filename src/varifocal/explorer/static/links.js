// Curves from the chosen token to the keys that it reads most.

const SVG = "http://www.w3.org/2000/svg";

/** Where a token is: the widest of its boxes, because its space may be at the end of the line above. */
export function boxOf(span) {
  const boxes = [...span.getClientRects()];
  return boxes.reduce((widest, box) => (box.width > widest.width ? box : widest), boxes[0] ?? span.getBoundingClientRect());
}

/** Draws curves over `sheet`; keys are [{token, weight, local_part, global_part}], spans are the tokens' elements. */
export function drawLinks(svg, sheet, spans, chosen, keys) {
  const frame = sheet.getBoundingClientRect();
  svg.setAttribute("width", sheet.scrollWidth);
  svg.setAttribute("height", sheet.scrollHeight);
  const place = (span) => {
    const box = boxOf(span);
    return [box.left - frame.left + sheet.scrollLeft + box.width / 2, box.top - frame.top + sheet.scrollTop + 3];
  };
  const [fromX, fromY] = place(spans[chosen]);
  const others = keys.filter((key) => key.token !== chosen);
  const most = Math.max(...others.map((key) => key.weight), 0.05);
  svg.replaceChildren(
    ...others.map((key) => {
      const [toX, toY] = place(spans[key.token]);
      const height = Math.min(40, 10 + Math.hypot(fromX - toX, fromY - toY) / 6);
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", `M${fromX} ${fromY} C${fromX} ${fromY - height} ${toX} ${toY - height} ${toX} ${toY}`);
      path.setAttribute("stroke-width", (1 + (3 * key.weight) / most).toFixed(1));
      path.setAttribute("class", kindOf(key));
      return path;
    }),
  );
}

function kindOf(key) {
  if (key.local_part === null) return "link";
  return key.local_part >= key.global_part ? "link local" : "link global";
}
