// One stream for all tabs of a browser: each stream of a tab would take one of the six connections that a browser has
// for an origin, and a seventh tab would hang. It also hands the token that looks to tabs that are opened later.
import { Feed } from "./feed.js";

/** @type {Map<MessagePort, {awake: boolean, closely: boolean, missed: boolean}>} */
const tabs = new Map();
let token = "", state = "lost";

const feed = new Feed((said) => {
  state = said.state ?? state;
  if (said.refused === token) token = "";
  for (const [port, tab] of tabs) {
    if (tab.awake) port.postMessage(said);
    else tab.missed ||= Boolean(said.events || said.gap);
  }
});

/** The stream is held while somebody looks at a tab. */
function hold() {
  const awake = [...tabs.values()].filter((tab) => tab.awake), holds = awake.length ? token : "";
  if (!holds) state = "lost";
  feed.use(holds, awake.some((tab) => tab.closely));
}

const told = {
  /** A tab begins, perhaps with the token of its last life. That of the other tabs is newer. */
  hello: (port, said) => {
    token ||= said.token;
    port.postMessage({ state, token });
  },
  /** A person has opened the page anew. */
  token: (port, said) => {
    token = said.token;
    for (const other of tabs.keys()) if (other !== port) other.postMessage({ token });
  },
  /** The door knows this token no more. */
  refused: (port, said) => { if (said.token === token) token = ""; },
  awake: (port, said, tab) => {
    Object.assign(tab, { awake: said.awake, closely: said.closely });
    if (!tab.awake) return;
    port.postMessage({ state, gap: tab.missed });
    tab.missed = false;
  },
  bye: (port) => tabs.delete(port),
};

self.onconnect = ({ ports: [port] }) => {
  const tab = { awake: true, closely: false, missed: false };
  tabs.set(port, tab);
  port.onmessage = ({ data }) => {
    told[data.kind](port, data, tab);
    hold();
  };
};
