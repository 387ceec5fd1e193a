/**
 * The one error of this client: what an ErrorPayload says.
 *
 * Source: PROTOCOL.md "Errors".
 */

export class GoondanError extends Error {
  /**
   * @param {string} code stable, for programs: `E_AGENT_TIMEOUT`
   * @param {string} message for people
   * @param {{ suggestion?: string | null, helpUrl?: string | null, retryAfterMs?: number | null }} [more]
   */
  constructor(code, message, more = {}) {
    super(message);
    this.name = "GoondanError";
    this.code = code;
    this.suggestion = more.suggestion ?? undefined;
    this.helpUrl = more.helpUrl ?? undefined;
    this.retryAfterMs = more.retryAfterMs ?? undefined;
  }
}
