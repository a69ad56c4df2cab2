// Search from disk: browsers start no workers there, so the worker's script runs in a hidden frame of this page.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // What the script sends arrives here, and not at the page, as it would from a frame.
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(address, document.baseURI).href;
        script.onload = done;
        script.onerror = () => failed(new Error(`${script.src} can't be loaded`));
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
