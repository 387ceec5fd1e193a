// Streams of events: reading one, and holding the live one. Needs nothing but fetch, so the shared worker has it too.

/** The first wait before a stream is opened again, and the longest (ms). */
const WAIT_MS = 250, MOST_WAIT_MS = 8000;
/** A stream says something every 15 s. One that was silent for so long is dead (ms). */
const SILENT_MS = 40000;
/** How often that is looked at. A clock that went on by more than three of them means that the machine slept (ms). */
const LOOK_MS = 5000;

/**
 * The events of a `text/event-stream`.
 * @param {ReadableStream<Uint8Array>} body
 * @param {() => void} [heard] is called for each piece that comes
 */
export async function* events(body, heard = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = "", id = "", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        const [name] = line.split(":", 1), text = line.slice(name.length + 1).replace(/^ /, "");
        if (name === "event") event = text;
        else if (name === "data") data.push(text);
        else if (name === "id") id = text;
        else if (!line) {
          if (data.length) yield { event: event || "message", id, data: data.join("\n") };
          event = "", data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Holds the live stream for a token, and opens it again when it ends. */
export class Feed {
  #tell;
  #token = "";
  #closely = false;
  #ending = new AbortController();
  #current = new AbortController();
  #heardAt = 0;

  /** @param {(said: {events?: object[], gap?: boolean, state?: string, refused?: string}) => void} tell */
  constructor(tell) {
    this.#tell = tell;
    let looked = Date.now();
    setInterval(() => {
      const now = Date.now(), slept = now - looked > 3 * LOOK_MS;
      looked = now;
      if (this.#token && (slept || now - this.#heardAt > SILENT_MS)) this.#current.abort();
    }, LOOK_MS);
  }

  /** Hold the stream of this token; "": hold none. `closely`: all that happens, at once. */
  use(token, closely = false) {
    if (token === this.#token && closely === this.#closely) return;
    this.#token = token, this.#closely = closely;
    this.#ending.abort();
    this.#ending = new AbortController();
    if (token) this.#hold(token, this.#ending.signal);
  }

  async #hold(token, ended) {
    for (let wait = WAIT_MS; !ended.aborted; wait = Math.min(2 * wait, MOST_WAIT_MS)) {
      this.#current = new AbortController();
      this.#heardAt = Date.now();
      try {
        const signal = AbortSignal.any([ended, this.#current.signal]);
        const answer = await fetch(`api/live?closely=${this.#closely}`, { headers: { authorization: `Bearer ${token}` }, cache: "no-store", signal });
        if (!answer.ok || !answer.body) {
          await answer.body?.cancel(); // what is not read keeps its connection
          if (answer.status !== 401) throw new Error(`status ${answer.status}`);
          this.#token = "";
          return this.#tell({ refused: token });
        }
        this.#tell({ state: "live", gap: true }); // what happened before is not in the stream
        wait = WAIT_MS / 2;
        for await (const { event, data } of events(answer.body, () => { this.#heardAt = Date.now(); })) {
          if (event === "batch") this.#tell({ events: JSON.parse(data) });
          else if (event === "gap") this.#tell({ gap: true });
        }
      } catch {
        // The door is gone, or the stream was given up: it is opened again.
      }
      if (ended.aborted) return;
      this.#tell({ state: "lost" });
      await new Promise((resolve) => setTimeout(resolve, wait * (0.75 + Math.random() / 2)));
    }
  }
}
