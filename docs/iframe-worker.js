// The site's search runs in a worker, which no browser starts for a page that is opened from the disk. There the worker's
// script runs in a hidden frame instead, and messages go between the frame and what stands here for the worker.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${new URL(url, location.href).href}"></script>`;
      frame.addEventListener("load", () => {
        this.inner = frame.contentWindow;
        this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
}
