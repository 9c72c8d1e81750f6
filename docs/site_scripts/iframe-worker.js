// A page that was opened from a disk may not start a worker: what the site's search does in one, it does here in a hidden frame.
// The theme looks for this name, and would otherwise load a script from another host.

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.inside = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.start(frame.contentWindow, address), { once: true });
      document.documentElement.append(frame);
    }

    async start(inside, address) {
      // What the worker says is heard here, and not by its own window.
      inside.postMessage = (answer) => this.dispatchEvent(new MessageEvent("message", { data: answer }));
      inside.importScripts = async (...addresses) => {
        for (const one of addresses) await load(inside, one);
      };
      await load(inside, address);
      this.inside = inside;
      for (const message of this.waiting.splice(0)) this.postMessage(message);
    }

    postMessage(message) {
      if (this.inside === null) this.waiting.push(message);
      else this.inside.dispatchEvent(new MessageEvent("message", { data: message }));
    }
  };
  window.Worker = window.IFrameWorker;
}

/** Runs a script in a window, and waits for its end. */
function load(inside, address) {
  return new Promise((loaded, failed) => {
    const script = inside.document.createElement("script");
    script.src = new URL(address, location.href);
    script.addEventListener("load", loaded);
    script.addEventListener("error", failed);
    inside.document.head.append(script);
  });
}
