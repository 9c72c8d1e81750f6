// The page: one text, the panels of the models, and the address that holds the view.

import { readAddress, writeAddress } from "./address.js";
import { Panel } from "./panel.js";
import { Connection } from "./server.js";

const PAUSE = 350;
const text = document.getElementById("text");
const shared = document.getElementById("shared");

// Where the chosen token begins in the text: tokens differ between models, characters do not. null is the last token.
let character = null;

const panels = [...document.querySelectorAll(".panel")].map(
  (root) => new Panel(root, { moved: save, chose: follow, gone: () => connection.lose() }),
);
const connection = new Connection(document.getElementById("connection"), document.body.dataset.start, readAll);

function save() {
  shared.textContent = "";
  const state = { text: text.value, character, panels: panels.map((panel) => panel.settings()) };
  history.replaceState(null, "", writeAddress(state));
}

/** A token was chosen in one panel: the others follow. */
function follow(start, where) {
  character = start;
  save();
  for (const panel of panels) if (panel !== where) panel.chooseAt(start);
}

function readAll() {
  save();
  for (const panel of panels) panel.read(text.value, character);
}

function open() {
  const given = readAddress(location.hash);
  if (given.text !== null) text.value = given.text;
  character = given.character;
  panels.forEach((panel, number) => panel.apply(given.panels[number]));
  readAll();
}

let pause;
text.addEventListener("input", () => {
  clearTimeout(pause);
  pause = setTimeout(() => {
    character = null;
    readAll();
  }, PAUSE);
});
window.addEventListener("hashchange", open);

document.getElementById("share").addEventListener("click", async () => {
  save();
  try {
    await navigator.clipboard.writeText(location.href);
    shared.textContent = "Copied. The address opens this view as long as this server runs.";
  } catch {
    shared.textContent = "The browser does not allow copying here: copy it from the address bar.";
  }
});

open();
