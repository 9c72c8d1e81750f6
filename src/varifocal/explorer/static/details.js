// What one token reads and what the model expects after it.

import { percent } from "./shades.js";
import { written } from "./tokens.js";

const STATES = { learned: "learned mix", local: "local only", global: "global only" };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A bar made of parts [[class, share], ...]; shares are of the whole width. */
function bar(parts) {
  const made = element("span", "bar");
  for (const [kind, share] of parts) {
    const part = element("i", kind);
    part.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    made.append(part);
  }
  return made;
}

export function showKeys(list, row, tokens, decides, choose) {
  // The key that is read most gets the longest bar: over many keys, all weights are small.
  const most = row.keys.length ? row.keys[0].weight : 1;
  list.replaceChildren(
    ...row.keys.map((key) => {
      const entry = element("li");
      const back = row.token - key.token;
      const word = element("button", "word");
      word.type = "button";
      word.append(element("bdi", "", tokens.name(key.token)));
      word.addEventListener("click", () => choose(key.token));
      const parts =
        // Where both branches read the same keys, neither of them has a part of its own.
        key.local_part === null || !decides
          ? [["whole", key.weight / most]]
          : [["local", key.local_part / most], ["global", key.global_part / most]];
      const where = back === 0 ? "itself" : `${back} back`;
      const share = element("span", "number", percent(key.weight));
      if (key.local_part !== null && decides) {
        const split = `local ${percent(key.local_part)}, global ${percent(key.global_part)}`;
        entry.title = split;
        share.append(element("span", "spoken", `, ${split}`));
      }
      entry.append(word, element("span", "where", where), bar(parts), share);
      return entry;
    }),
  );
}

/** What comes next in the states of the gates that were asked for; `answers` are those that have come. */
export function showNext(root, states, answers) {
  const most = Math.max(...answers.flatMap((state) => state.candidates.map((one) => one.probability)));
  root.replaceChildren(
    ...states.map((gates) => {
      const state = answers.find((one) => one.gates === gates);
      const column = element("section", `state ${gates}`);
      column.append(element("h5", "", states.length > 1 ? STATES[gates] : "this model"));
      if (state === undefined) {
        column.append(element("p", "following", "reading …"));
        return column;
      }
      const list = element("ol");
      for (const one of state.candidates) {
        const entry = element("li", one.follows ? "follows" : "");
        const word = element("span", "word");
        word.append(element("bdi", "", written(one.text)));
        if (one.follows) word.append(element("span", "spoken", " (follows in the text)"));
        entry.append(word, bar([["whole", one.probability / most]]), element("span", "number", percent(one.probability)));
        list.append(entry);
      }
      column.append(list);
      if (state.following !== null) {
        column.append(element("p", "following", `what follows in the text: ${percent(state.following)}`));
      }
      return column;
    }),
  );
}
