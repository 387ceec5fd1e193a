// Made by `python -m scripts.node_client --types` from clients/node/errors.mjs. Do not edit.

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
    constructor(code: string, message: string, more?: {
        suggestion?: string | null;
        helpUrl?: string | null;
        retryAfterMs?: number | null;
    });
    /** @readonly */
    readonly code: string;
    /** What a person may do about it. @readonly */
    readonly suggestion: string | undefined;
    /** @readonly */
    readonly helpUrl: string | undefined;
    /** When the same is worth another try (milliseconds). @readonly */
    readonly retryAfterMs: number | undefined;
}
