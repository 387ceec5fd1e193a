// Made by `python -m scripts.node_client --types` from clients/node/index.mjs. Do not edit.

/** Find a running kernel, connect, and wait for its welcome. @param {ConnectOptions} [options] @returns {Promise<Goondan>} */
export function connect({ bundle, runDir, timeoutMs }?: ConnectOptions): Promise<Goondan>;
export { GoondanError };
/** Every method may reject with GoondanError. @implements {AsyncDisposable} */
export class Goondan implements AsyncDisposable {
    /** @private @param {Link} link */
    private constructor();
    /**
     * Ask an agent, and wait for its answer. A failed one is thrown.
     *
     * @template [T=unknown]
     * @param {string} agent @param {string} text @param {AskOptions<T>} [options]
     * @returns {Promise<Answer<T>>}
     */
    ask<T = unknown>(agent: string, text: string, options?: AskOptions<T>): Promise<Answer<T>>;
    /**
     * The same, hearing of the turn meanwhile; the answer comes last. Who leaves the loop early cancels the question.
     *
     * @template [T=unknown]
     * @param {string} agent @param {string} text @param {AskOptions<T>} [options]
     * @returns {AsyncGenerator<RuntimeEvent | ({ kind: "answer" } & Answer<T>), void, void>}
     */
    stream<T = unknown>(agent: string, text: string, options?: AskOptions<T>): AsyncGenerator<RuntimeEvent | ({
        kind: "answer";
    } & Answer<T>), void, void>;
    /**
     * Ask, and wait for nothing but that it is accepted: then it will be worked on. Gives its event id.
     *
     * @param {string} agent @param {string} text @param {Omit<AskOptions, "schema">} [options]
     * @returns {Promise<string>}
     */
    send(agent: string, text: string, { deadlineMs, ...options }?: Omit<AskOptions, "schema">): Promise<string>;
    /**
     * Call a tool, by its full name. Its error is thrown.
     *
     * @param {string} tool @param {unknown} [args] @param {CallOptions} [options]
     * @returns {Promise<ToolResult>}
     */
    call(tool: string, args?: unknown, { agent, ...options }?: CallOptions): Promise<ToolResult>;
    /**
     * Cancel an event, or what an instance works on. Gives how it ended: `cancelled`, `done`, `failed`, `expired`, `dead`.
     *
     * @param {{ eventId: string, agent?: never, instance?: never } | { eventId?: never, agent: string, instance?: string }} what
     * @returns {Promise<string>}
     */
    cancel({ agent, instance, eventId: named }: {
        eventId: string;
        agent?: never;
        instance?: never;
    } | {
        eventId?: never;
        agent: string;
        instance?: string;
    }): Promise<string>;
    /** What waits for a person, the oldest first. @returns {Promise<ApprovalItem[]>} */
    approvals(): Promise<ApprovalItem[]>;
    /**
     * Decide one of these, by its id. Gives its state.
     *
     * @param {string} id @param {"yes" | "no" | "answer"} decision @param {{ reason?: string, answer?: unknown }} [more]
     * @returns {Promise<string>}
     */
    decide(id: string, decision: "yes" | "no" | "answer", { reason, answer }?: {
        reason?: string;
        answer?: unknown;
    }): Promise<string>;
    /** The instances of agents whose processes run. @returns {Promise<Instance[]>} */
    instances(): Promise<Instance[]>;
    /** What the answers to this program have used so far; money of the first currency only. @returns {Usage} */
    usage(): Usage;
    /** End orderly. What is unanswered rejects with `E_LINK_CLOSED`. */
    close(): Promise<void>;
    [Symbol.asyncDispose](): Promise<void>;
    #private;
}
export type ApprovalItem = import("./wire.d.ts").ApprovalItem;
export type RuntimeEvent = import("./wire.d.ts").RuntimeEvent;
export type ToolResult = import("./wire.d.ts").ToolResult;
export type Usage = import("./wire.d.ts").Usage;
export type ConnectOptions = {
    /**
     * The bundle whose running kernel is meant: its folder or file. Default: the folder that the program stands in.
     */
    bundle?: string | undefined;
    /**
     * The kernel's runtime directory. It comes before `bundle`. Default, without either: `GOONDAN_RUN_DIR`, if set.
     */
    runDir?: string | undefined;
    /**
     * How long the kernel may take to answer (milliseconds). Default: 10,000.
     */
    timeoutMs?: number | undefined;
};
/**
 * A picture or a PDF for the model: a path, its bytes, or one of these with a name.
 */
export type Attachment = string | Uint8Array | {
    data: string | Uint8Array;
    name?: string;
};
export type AskOptions<T = unknown> = {
    /**
     * The conversation with the agent. Default: `default`.
     */
    instance?: string | undefined;
    /**
     * PNG, JPEG, GIF, WebP, PDF: at most 16, 16 MiB each, 20 MiB together.
     */
    files?: readonly Attachment[] | undefined;
    /**
     * Makes the answer's `object`; what it throws becomes
     * `E_OUTPUT_INVALID`.
     */
    schema?: {
        parse(object: unknown): T;
    } | ((object: unknown) => T) | undefined;
    /**
     * When it is too late (milliseconds from now). Default: 600,000, of `send` null: never.
     */
    deadlineMs?: number | null | undefined;
    /**
     * Names the question, so that it can be asked again and is worked on once. Default: a random one.
     */
    eventId?: string | undefined;
    /**
     * The working directory of its tools: an absolute path. Default: the instance's own.
     */
    workdir?: string | undefined;
    /**
     * The trace that it belongs to: 32 hexadecimal digits. Default: a new one.
     */
    traceId?: string | undefined;
    /**
     * Gives up the question, and cancels the work on it.
     */
    signal?: AbortSignal | undefined;
};
export type OfCall = {
    /**
     * In whose name the tool is called: its rules apply. Default: `_operator`, who may call every tool.
     */
    agent?: string | undefined;
};
export type CallOptions = OfCall & Pick<AskOptions, "instance" | "deadlineMs" | "eventId" | "workdir" | "traceId" | "signal">;
export type OfAnswer<T> = {
    text: string;
    /**
     * Of an agent with an output schema: the value that the text is. Integers beyond 2^53 are bigint.
     */
    object: T;
    eventId: string;
};
/**
 * How a turn ended. A failed one is thrown, so the status is always `completed`.
 */
export type Answer<T = unknown> = OfAnswer<T> & Omit<import("./wire.d.ts").Answer, "response" | "error" | "output" | "object" | "steps">;
export type Instance = {
    agent: string;
    instanceKey: string | null;
    pid: number | null;
    startedMs: number | null;
};
import { GoondanError } from "./errors.mjs";
