// One stream for all tabs of a browser: each stream of a tab would take one of the six connections that a browser has
// for an origin, and a seventh tab would hang. It also hands the token that looks to tabs that are opened later.
import { Feed } from "./feed.js";

/** @type {Map<MessagePort, {awake: boolean, missed: boolean}>} */
const tabs = new Map();
let token = "", handed = false, state = "lost";

const feed = new Feed((said) => {
  state = said.state ?? state;
  if (said.refused === token) token = "";
  for (const [port, tab] of tabs) {
    if (tab.awake || !(said.events || said.gap)) port.postMessage(said);
    else tab.missed = true;
  }
});

/** The stream is held while somebody looks at a tab. */
function hold() {
  const holds = [...tabs.values()].some((tab) => tab.awake) ? token : "";
  if (!holds) state = "lost";
  feed.use(holds);
}

const told = {
  /** A tab begins, perhaps with the token of its last life. That of the other tabs is newer. */
  hello: (port, said) => {
    if (!token) ({ token, handed } = said);
    port.postMessage({ state, token: handed ? token : "" });
  },
  /** A person has opened the page anew. */
  token: (port, said) => {
    ({ token, handed } = said);
    for (const other of tabs.keys()) if (handed && other !== port) other.postMessage({ token });
  },
  /** The door knows this token no more. */
  refused: (port, said) => { if (said.token === token) token = ""; },
  awake: (port, said, tab) => {
    tab.awake = said.awake;
    if (!tab.awake) return;
    port.postMessage({ state, gap: tab.missed });
    tab.missed = false;
  },
  bye: (port) => tabs.delete(port),
};

self.onconnect = ({ ports: [port] }) => {
  const tab = { awake: true, missed: false };
  tabs.set(port, tab);
  port.onmessage = ({ data }) => {
    told[data.kind](port, data, tab);
    hold();
  };
};
