Object.prototype.x = 1
Object.prototype.toJSON = () => 'changed'; Array.prototype.toJSON = () => 'changed'; String.prototype.toJSON = () => 'changed'
for (const k of ['type', 'callId', 'status', 'output', 'code', 'messageId', 'deadlineMs', 'suggestion', 'then']) Object.prototype[k] = 'changed'
Object.defineProperty(Object.prototype, 'callId', {set() { throw 1 }, get() { return 'changed' }, configurable: true})
for (const k of ['push', 'shift', 'map', 'join', 'sort', 'includes', 'slice', 'some']) Array.prototype[k] = () => { throw 1 }
for (const k of ['charCodeAt', 'slice', 'split', 'replace', 'includes']) String.prototype[k] = () => { throw 1 }
for (const k of ['get', 'set', 'has', 'delete']) { Map.prototype[k] = () => { throw 1 }; Set.prototype[k] = () => { throw 1 } }
for (const k of ['utf8Write', 'utf8Slice', 'write', 'toString', 'subarray', 'set']) Buffer.prototype[k] = () => { throw 1 }
Uint8Array.prototype.set = () => { throw 1 }; DataView.prototype.setFloat64 = () => { throw 1 }
Number.isSafeInteger = () => { throw 1 }; Math.min = Math.max = () => { throw 1 }; Array.isArray = () => false; Object.keys = () => []
Function.prototype.call = () => { throw 1 }; Function.prototype.bind = () => { throw 1 }
globalThis.String = globalThis.Number = globalThis.Promise = globalThis.BigInt = globalThis.DataView = undefined
Object.freeze(Object.prototype); Object.freeze(Array.prototype)
JSON.stringify = () => { throw 1 }; Error.prepareStackTrace = () => { throw 1 }
Promise.prototype.then = () => { throw 1 }
