// Asks the server, and watches whether it answers.

/** The server refused the question; the message says why. */
export class Refusal extends Error {}

/** The server does not answer. */
export class Gone extends Error {}

const PATIENCE = 1500;
const HEARTBEAT = 5000;

export async function ask(path, question, signal) {
  let answer;
  try {
    answer = await fetch(`api/${path}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(question),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone(error.message);
  }
  if (answer.ok) return answer.json();
  throw new Refusal(await reason(answer));
}

/** How far the server is with the question that it works on; nothing if it does not say. */
export async function progress() {
  try {
    const answer = await fetch("api/progress");
    return answer.ok ? await answer.json() : { done: 0, of: 0 };
  } catch {
    return { done: 0, of: 0 };
  }
}

async function reason(answer) {
  try {
    return (await answer.json()).detail;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

/** Shows when the server goes away, and calls `back` when it returns. */
export class Connection {
  constructor(banner, start, back) {
    this.banner = banner;
    this.start = start;
    this.back = back;
    this.lost = false;
    setInterval(() => document.hidden || this.lost || this.check(), HEARTBEAT);
  }

  lose() {
    if (this.lost) return;
    this.lost = true;
    this.say("The server does not answer. The page keeps what it shows and continues when the server is back.");
    this.again();
  }

  again() {
    setTimeout(() => this.check(), PATIENCE);
  }

  say(sentence) {
    this.banner.textContent = sentence;
    this.banner.hidden = false;
  }

  async check() {
    let answer;
    try {
      answer = await fetch("api/start");
    } catch {
      if (this.lost) this.again();
      else this.lose();
      return;
    }
    if (!answer.ok) {
      this.lost = true;
      this.say("The server was restarted under another address. Open the address that it printed.");
      this.again();
      return;
    }
    if ((await answer.json()).start !== this.start) {
      // A restarted server may serve other models; the address keeps the view.
      location.reload();
      return;
    }
    if (this.lost) {
      this.lost = false;
      this.banner.hidden = true;
      this.back();
    }
  }
}
