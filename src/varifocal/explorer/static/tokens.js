// The text as tokens: they are coloured, can be reached by keyboard, and show their numbers on hover and focus.

import { boxOf } from "./links.js";
import { extremes, gateShade, percent, readShade, widthShade } from "./shades.js";

const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g;
const PART = "◌"; // stands for a part of a character that takes several tokens

/** Makes control characters visible, so that a text cannot hide anything. */
function visible(piece) {
  return piece.replace(CONTROLS, (sign) => {
    const code = sign.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\x${code.toString(16)}`;
  });
}

/** How a token is written on its own: spaces and line breaks are made visible too. */
export function written(piece) {
  if (/^\ufffd*$/.test(piece)) return PART;
  return visible(piece).replace(/ /g, "␣").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

/** The tokens of four letters or more that stood in the text before, but only `near` tokens back or more. */
function farRepeats(pieces, near) {
  const last = new Map();
  const found = new Set();
  pieces.forEach((piece, index) => {
    const word = piece.trim().toLowerCase();
    if (word.length >= 4 && last.has(word) && index - last.get(word) >= near) found.add(index);
    last.set(word, index);
  });
  return found;
}

export class Tokens {
  /** `choose(index)` is called when a token is clicked or Enter is pressed on it. */
  constructor(root, hint, near, choose) {
    this.root = root;
    this.near = near;
    this.far = new Set();
    this.hint = hint;
    this.choose = choose;
    this.spans = [];
    this.view = null;
    this.row = null;
    root.addEventListener("click", (event) =>
      this.at(event, (index) => {
        // What was clicked must be seen: the numbers that hover over it come back with the next movement.
        this.hush();
        choose(index);
      }),
    );
    root.addEventListener("pointerover", (event) => this.at(event, (index) => this.tell(index)));
    root.addEventListener("pointerleave", () => this.hush());
    root.addEventListener("focusin", (event) => {
      if (event.target.matches(":focus-visible")) this.at(event, (index) => this.tell(index));
    });
    root.addEventListener("focusout", () => this.hush());
    root.addEventListener("keydown", (event) => this.press(event));
  }

  at(event, act) {
    const span = event.target.closest("[role=option]");
    if (span !== null) act(this.spans.indexOf(span));
  }

  show(view) {
    this.view = view;
    this.row = null;
    this.spans = view.pieces.map((piece, index) => {
      const span = document.createElement("span");
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      span.tabIndex = -1;
      span.textContent = view.added[index] ?? (visible(piece).replace(/\r?\n/g, "⏎\n") || PART);
      return span;
    });
    this.root.replaceChildren(...this.spans);
    this.far = farRepeats(view.pieces, this.near);
    if (this.spans.length) this.spans[0].tabIndex = 0;
  }

  name(index) {
    return this.view.added[index] ?? written(this.view.pieces[index]);
  }

  widthOf(index) {
    return this.view.width?.[index] ?? this.view.window;
  }

  /** The facts about a token, as short phrases. */
  numbers(index) {
    const { gate, decides } = this.view;
    const parts = [`token ${index}`];
    if (gate !== null) {
      parts.push(`gate ${gate[index].toFixed(2)}${decides[index] ? "" : " (decides nothing here)"}`);
    }
    const width = this.widthOf(index);
    if (width !== null) parts.push(`window ${Math.round(width)} keys`);
    if (this.row !== null && index < this.row.weights.length) {
      parts.push(`read by the chosen token: ${percent(this.row.weights[index])}`);
    }
    return parts;
  }

  /** Colours all tokens by "gate", "width" or "read". */
  colour(by) {
    const { gate, decides, width } = this.view;
    const [least, most] = width === null ? [0, 0] : extremes(width);
    this.spans.forEach((span, index) => {
      let shade = "shade-plain";
      if (by === "gate" && gate !== null) shade = gateShade(gate[index], decides[index]);
      if (by === "width" && width !== null) shade = widthShade(width[index], least, most);
      if (by === "read" && this.row !== null && index < this.row.weights.length) {
        shade = readShade(this.row.weights[index]);
      }
      span.className = shade;
      if (width !== null) span.style.setProperty("--share", width[index] / most);
      span.classList.toggle("measured", width !== null);
      span.classList.toggle("far-repeat", this.far.has(index));
      span.setAttribute("aria-label", `${this.name(index)}, ${this.numbers(index).join(", ")}`);
    });
  }

  /** Marks the chosen token, its window and the keys that it reads most. */
  mark(chosen, row) {
    this.row = row;
    const width = this.widthOf(chosen);
    const read = new Set(row === null ? [] : row.keys.map((key) => key.token));
    this.spans.forEach((span, index) => {
      const distance = chosen - index;
      span.setAttribute("aria-selected", String(index === chosen));
      span.tabIndex = index === chosen ? 0 : -1;
      span.classList.toggle("inside", width !== null && distance >= 0 && distance < width);
      span.classList.toggle("fading", width !== null && this.view.edge > 0 && distance < width && distance > width - this.view.edge);
      span.classList.toggle("key", read.has(index) && index !== chosen);
    });
  }

  tell(index) {
    const [first, ...rest] = this.numbers(index);
    const head = document.createElement("b");
    head.textContent = this.name(index);
    const lines = [first, ...rest].map((part) => {
      const line = document.createElement("span");
      line.textContent = part;
      return line;
    });
    this.hint.replaceChildren(head, ...lines);
    this.hint.hidden = false;
    const box = boxOf(this.spans[index]);
    const own = this.hint.getBoundingClientRect();
    const left = Math.max(4, Math.min(box.left, document.documentElement.clientWidth - own.width - 4));
    const above = box.top - own.height - 6;
    this.hint.style.left = `${left}px`;
    this.hint.style.top = `${above >= 0 ? above : box.bottom + 6}px`;
  }

  hush() {
    this.hint.hidden = true;
  }

  press(event) {
    const now = this.spans.indexOf(document.activeElement);
    if (now < 0) return;
    const last = this.spans.length - 1;
    const goals = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last };
    let goal = goals[event.key];
    if (event.key === "ArrowDown") goal = this.beside(now, 1);
    if (event.key === "ArrowUp") goal = this.beside(now, -1);
    if (goal !== undefined) {
      this.focus(Math.max(0, Math.min(last, goal)));
    } else if (event.key === "Enter" || event.key === " ") {
      this.choose(now);
    } else if (event.key === "Escape") {
      this.hush();
    } else {
      return;
    }
    event.preventDefault();
  }

  focus(index) {
    this.spans.forEach((span, other) => (span.tabIndex = other === index ? 0 : -1));
    this.spans[index].focus();
  }

  /** The token nearest to this one in the line below or above. */
  beside(now, step) {
    const from = boxOf(this.spans[now]);
    let found = now;
    let line = null;
    let nearest = Infinity;
    for (let index = now + step; index >= 0 && index < this.spans.length; index += step) {
      const box = boxOf(this.spans[index]);
      if (Math.abs(box.top - from.top) < from.height / 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > from.height / 2) break;
      if (Math.abs(box.left - from.left) < nearest) {
        nearest = Math.abs(box.left - from.left);
        found = index;
      }
    }
    return found;
  }
}
