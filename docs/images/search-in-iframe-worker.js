// Browsers start no Worker for a page that was opened from a folder. There, this class runs the
// script of the search in a hidden frame instead. The script of the theme looks for its name, and
// for the element of its own script, to find its languages.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    #inside;
    #ready;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.#inside = frame.contentWindow;
      const load = (source) =>
        new Promise((done, fail) => {
          const script = frame.contentDocument.createElement("script");
          script.onload = done;
          script.onerror = () => fail(new Error(`${source} cannot be loaded`));
          script.src = new URL(source, document.baseURI);
          frame.contentDocument.head.append(script);
        });
      this.#inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.#inside.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data }));
      };
      this.#ready = load(url);
    }

    async postMessage(data) {
      await this.#ready;
      this.#inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
