// The state of the page in the part of its address after the #, which browsers do not send.

const FIELDS = ["layer", "head", "gates", "colour"];

/** The state in an address: {text, character, panels: {0: {layer, ...}}}; what the address leaves out is null or absent. */
export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const character = given.get("character");
  const state = { text: given.get("text"), character: /^\d+$/.test(character) ? Number(character) : null, panels: {} };
  for (const [name, value] of given) {
    const [field, number = "1"] = name.split(".");
    if (FIELDS.includes(field)) {
      state.panels[Number(number) - 1] ??= {};
      state.panels[Number(number) - 1][field] = value;
    }
  }
  return state;
}

/** The address of a state, with panels as a list. */
export function writeAddress({ text, character, panels }) {
  const fields = new URLSearchParams();
  panels.forEach((panel, number) => {
    for (const field of FIELDS) fields.set(number === 0 ? field : `${field}.${number + 1}`, panel[field]);
  });
  if (character !== null) fields.set("character", character);
  fields.set("text", text);
  return `#${fields}`;
}
