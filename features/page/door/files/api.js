// Questions to the door, with the tokens of session.js. Paths begin with /api/v1 or /page/api.
import { events } from "./feed.js";
import { Problem } from "./problem.js";
import * as session from "./session.js";

export { Problem };

const cancelled = () => new Problem({ code: "cancelled", detail: "nothing was done: there is no code to act with" });

async function request(path, { method = "GET", body, headers = {}, act = false, signal } = {}) {
  if (act && !session.toAct() && !(await session.askToAct())) throw cancelled();
  const token = act ? session.toAct() : session.looking.value;
  const said = { authorization: `Bearer ${token}`, ...headers };
  if (body !== undefined) said["content-type"] = "application/json";
  const how = { method, headers: said, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store", signal };
  const answer = await fetch(path, how).catch((error) => { throw signal?.aborted ? error : Problem.gone(); });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    session.forget(token);
    if (act) return request(path, { method, body, headers, act, signal });
  }
  throw await Problem.of(answer);
}

async function content(answer) {
  const type = answer.headers.get("content-type") ?? "";
  return type.includes("json") ? answer.json() : type.startsWith("image/") ? answer.blob() : answer.text();
}

function withQuery(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Ask with the token that looks. */
export const get = async (path, query) => content(await request(withQuery(path, query)));

/** Ask by POST with the token that looks. */
export const read = async (path, body) => content(await request(path, { method: "POST", body }));

/** Act. Asks the person for a code when this tab has none; a person who does not want to rejects with `cancelled`. */
export const post = async (path, body = {}) => content(await request(path, { method: "POST", body, act: true }));

/** The events of a stream. A POST acts. */
export async function* stream(path, { method = "GET", body, headers = {}, signal } = {}) {
  const said = { accept: "text/event-stream", ...headers };
  yield* events((await request(path, { method, body, headers: said, act: method !== "GET", signal })).body);
}

/** Give the person a file. */
export function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
