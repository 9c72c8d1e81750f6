// One model: its controls, the text in the chosen head, and the chosen token.

import { showKeys, showNext } from "./details.js";
import { showFarMap } from "./far_map.js";
import { showGateMap } from "./gate_map.js";
import { boxOf, drawLinks } from "./links.js";
import { ask, Gone, progress, Refusal } from "./server.js";
import { legendOf, showLegend } from "./shades.js";
import { Tokens } from "./tokens.js";

export class Panel {
  /** Calls `moved()` when a control changed, `chose(character)` when a token was chosen, `gone()` when the server is away. */
  constructor(root, { moved, chose, gone }) {
    this.root = root;
    this.model = Number(root.dataset.model);
    this.gone = gone;
    this.chose = chose;
    this.text = "";
    this.wanted = null;
    this.view = null;
    this.row = null;
    this.chosen = null;
    this.pending = null;
    this.find = (name) => root.querySelector(`.${name}`);
    this.fields = Object.fromEntries(["layer", "head", "gates", "colour"].map((name) => [name, this.find(name)]));
    this.tokens = new Tokens(this.find("tokens"), document.getElementById("hint"), Number(root.dataset.near), (index) => this.choose(index));
    for (const name of ["layer", "head", "gates"]) {
      this.fields[name].addEventListener("change", () => {
        moved();
        this.read(this.text, this.wanted);
      });
    }
    this.fields.colour.addEventListener("change", () => {
      moved();
      this.paint();
    });
    new ResizeObserver(() => this.draw()).observe(this.find("tokens"));
  }

  settings() {
    return Object.fromEntries(Object.entries(this.fields).map(([name, field]) => [name, field.value]));
  }

  /** Takes settings from an address; settings that the model does not offer are ignored. */
  apply(settings) {
    for (const [name, value] of Object.entries(settings ?? {})) {
      const field = this.fields[name];
      if ([...field.options].some((option) => option.value === value)) field.value = value;
    }
  }

  question() {
    const { layer, head, gates } = this.settings();
    return { model: this.model, text: this.text, layer: Number(layer), head: Number(head), gates };
  }

  /** The token that holds a character; the last one for null. */
  tokenAt(character) {
    const { starts } = this.view;
    if (character === null) return starts.length - 1;
    let found = 0;
    starts.forEach((start, index) => {
      if (start <= character && this.view.pieces[index] !== "") found = index;
    });
    return found;
  }

  /** Reads a text, then chooses a token: the one that holds a character, or the last. */
  async read(text, character) {
    this.text = text;
    this.wanted = character;
    this.chosen = null;
    await this.asking(async (signal) => {
      if (text === "") {
        this.empty();
        return;
      }
      this.view = await ask("text", this.question(), signal);
      this.describe();
      this.tokens.show(this.view);
      await this.detail(this.tokenAt(character), signal);
    });
  }

  choose(index) {
    this.wanted = this.view.starts[index];
    this.chose(this.wanted, this);
    this.asking((signal) => this.detail(index, signal));
  }

  /** Chooses the token that holds a character, if a text is shown. */
  chooseAt(character) {
    this.wanted = character;
    if (this.view !== null) this.asking((signal) => this.detail(this.tokenAt(character), signal));
  }

  async detail(index, signal) {
    this.chosen = index;
    this.row = null;
    this.tokens.mark(index, null);
    this.paint();
    this.reveal(index);
    const question = { ...this.question(), token: index };
    this.row = await ask("token", question, signal);
    this.tokens.mark(index, this.row);
    this.paint();
    this.showDetails();
    await this.streamed(question, signal);
  }

  /** Asks for what takes longer, and shows each answer as it comes: the next tokens by state of the gates, the map. */
  async streamed(question, signal) {
    const offered = [...this.fields.gates.options].map((option) => option.value);
    // The state that is shown was read already; others are read for this.
    const states = [question.gates, ...offered.filter((gates) => gates !== question.gates)];
    const answers = [];
    this.find("after").classList.add("stale");
    this.find("far-map").classList.add("stale");
    for (const gates of states) {
      answers.push(await ask("next", { ...question, gates }, signal));
      showNext(this.find("next"), offered, answers);
      this.find("after").hidden = false;
      this.find("after").classList.remove("stale");
      if (gates === question.gates) await this.showFar(question, signal);
    }
  }

  async showFar(question, signal) {
    const { shares } = await ask("far", question, signal);
    const windows = [...this.fields.layer.options].map((option) => JSON.parse(option.dataset.windows));
    showFarMap(this.find("far-map"), shares, windows, Number(this.root.dataset.near), question, (layer, head) => this.go(layer, head));
    this.find("far-map").classList.remove("stale");
  }

  /** Scrolls the sheet, and not the page, to a token. */
  reveal(index) {
    const sheet = this.find("sheet");
    const frame = sheet.getBoundingClientRect();
    const box = boxOf(this.tokens.spans[index]);
    if (box.top < frame.top) sheet.scrollTop -= frame.top - box.top + box.height;
    if (box.bottom > frame.bottom) sheet.scrollTop += box.bottom - frame.bottom + box.height;
  }

  /** Runs one question at a time; a new question aborts the one before. */
  async asking(work) {
    this.pending?.abort();
    const turn = new AbortController();
    this.pending = turn;
    this.root.setAttribute("aria-busy", "true");
    const watch = setInterval(() => this.follow(turn), 500);
    try {
      await work(turn.signal);
      this.complain(null);
    } catch (error) {
      if (error instanceof Gone) this.gone();
      else if (error instanceof Refusal) this.complain(error.message);
      else if (error.name !== "AbortError") throw error;
    } finally {
      clearInterval(watch);
      if (this.pending === turn) this.root.setAttribute("aria-busy", "false");
    }
  }

  /** Says how far a reading is that takes its time. */
  async follow(turn) {
    const { done, of } = await progress();
    if (this.pending !== turn || this.root.getAttribute("aria-busy") !== "true" || of === 0 || done >= of) return;
    this.find("notice").textContent = `Reading: layer ${done} of ${of} …`;
    this.find("notice").hidden = false;
  }

  go(layer, head) {
    this.fields.layer.value = layer;
    this.fields.head.value = head;
    this.fields.head.dispatchEvent(new Event("change"));
  }

  complain(sentence) {
    const trouble = this.find("trouble");
    trouble.textContent = sentence ?? "";
    trouble.hidden = sentence === null;
    this.find("body").classList.toggle("stale", sentence !== null);
    // The count of the text before would be wrong beside a refusal.
    if (sentence !== null) this.find("notice").hidden = true;
    else if (this.view !== null) this.count();
  }

  empty() {
    this.view = null;
    this.row = null;
    this.tokens.root.replaceChildren();
    this.find("links").replaceChildren();
    for (const part of ["details", "after", "gates-map", "far-map", "notice"]) this.find(part).hidden = true;
    this.complain(null);
  }

  /** Shows what this layer has, and offers the colours that fit. */
  describe() {
    const layer = this.fields.layer.selectedOptions[0].dataset;
    this.find("words").textContent = `${layer.mechanism}: ${layer.words}.`;
    const offered = { gate: this.view.gate !== null, width: this.view.width !== null, read: true };
    for (const option of this.fields.colour.options) option.disabled = !offered[option.value];
    if (!offered[this.fields.colour.value]) this.fields.colour.value = offered.gate ? "gate" : "read";
    this.count();
    const now = this.question();
    const heads = this.fields.head.options.length;
    showGateMap(this.find("gates-map"), this.view.gate_map, heads, now, (layer, head) => this.go(layer, head));
  }

  /** How long the text is. */
  count() {
    const notice = this.find("notice");
    const most = Number(this.root.dataset.most);
    const count = `${this.view.pieces.length.toLocaleString("en")} tokens of at most ${most.toLocaleString("en")}`;
    notice.textContent = this.view.beyond ? `${count}; longer than the texts that this model was made for.` : `${count}.`;
    notice.hidden = false;
  }

  paint() {
    if (this.view === null) return;
    const marks = this.row;
    this.tokens.colour(this.fields.colour.value);
    if (this.chosen !== null) this.tokens.mark(this.chosen, marks);
    showLegend(this.find("legend"), legendOf(this.fields.colour.value, this.view));
    this.draw();
  }

  draw() {
    if (this.row === null || this.chosen === null) {
      this.find("links").replaceChildren();
      return;
    }
    drawLinks(this.find("links"), this.find("sheet"), this.tokens.spans, this.chosen, this.row.keys);
  }

  showDetails() {
    const index = this.chosen;
    this.find("chosen").textContent = `Token ${index}: ${this.tokens.name(index)}`;
    this.find("summary").textContent = this.sentence(index);
    showKeys(this.find("keys"), this.row, this.tokens, this.view.decides?.[index] ?? true, (key) => this.choose(key));
    this.find("details").hidden = false;
  }

  sentence(index) {
    const { gate, decides } = this.view;
    const parts = [];
    if (gate === null) parts.push("This layer has no gate between branches.");
    else if (!decides[index]) parts.push(`Gate ${gate[index].toFixed(2)}, but both branches read the same keys here.`);
    else parts.push(`Gate ${gate[index].toFixed(2)}: ${Math.round(gate[index] * 100)} % local, ${Math.round((1 - gate[index]) * 100)} % global.`);
    const width = this.tokens.widthOf(index);
    if (width !== null) parts.push(`Its window holds ${Math.round(width)} keys, marked by a line above them.`);
    return parts.join(" ");
  }
}
