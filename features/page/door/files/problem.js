/** Why a request failed: the door's problem document (RFC 9457), or what the page itself knows. */
export class Problem extends Error {
  /** @param {{status?: number, code?: string, detail?: string, suggestion?: string}} said */
  constructor({ status = 0, code = "E_PAGE", detail = "the request has failed", suggestion = "" }) {
    super(detail);
    Object.assign(this, { name: "Problem", status, code, suggestion });
  }

  /** @param {Response} answer */
  static async of(answer) {
    const said = await answer.json().catch(() => ({}));
    return new Problem({ detail: `the door has answered with the status ${answer.status}`, ...said, status: answer.status });
  }

  static gone() {
    return new Problem({ code: "gone", detail: "the door does not answer", suggestion: "start it with: gdn ui" });
  }
}
