/**
 * The one error of this client: what an ErrorPayload says.
 *
 * Source: PROTOCOL.md "Errors".
 */

/** Everything that goes wrong. `code` is stable and for programs; see docs/errors.md. */
export class GoondanError extends Error {
  /**
   * @param {string} code stable, for programs: `E_AGENT_TIMEOUT`
   * @param {string} message for people
   * @param {{ suggestion?: string | null, helpUrl?: string | null, retryAfterMs?: number | null }} [more]
   */
  constructor(code, message, more = {}) {
    super(message);
    this.name = "GoondanError";
    /** @readonly */
    this.code = code;
    /** What a person may do about it. @readonly */
    this.suggestion = more.suggestion ?? undefined;
    /** @readonly */
    this.helpUrl = more.helpUrl ?? undefined;
    /** When the same is worth another try (milliseconds). @readonly */
    this.retryAfterMs = more.retryAfterMs ?? undefined;
  }
}
