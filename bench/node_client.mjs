/** The asker of node_client.py: as python_client.py asks, with the client for Node.js. Arguments: RUN_DIR, seconds, agent, responders, input. */

import { connect } from "../clients/node/index.mjs";

const [runDir, seconds, agent, responders, text] = process.argv.slice(2);
const lanes = [...Array(Number(responders)).keys()].map((number) => `r${number}`);
const WARM_UP = 500;
const gdn = await connect({ runDir });
const ask = (instance) => gdn.ask(agent, text, { instance });

for (let number = 0; number < WARM_UP; number++) await ask(lanes[number % lanes.length]);
const begun = performance.now();
const spent = process.cpuUsage();
let until = begun + (Number(seconds) * 2000) / 3;
let done = 0;
await Promise.all(
  lanes.map(async (lane) => {
    for (; performance.now() < until; done++) await ask(lane);
  }),
);
const rate = (done / (performance.now() - begun)) * 1000;
const { user, system } = process.cpuUsage(spent);
const times = [];
until = performance.now() + (Number(seconds) * 1000) / 3;
for (let before; (before = performance.now()) < until; times.push(performance.now() - before)) await ask(lanes[0]);
times.sort((one, other) => one - other);
const centile = (part) => times[Math.floor(times.length * part)] * 1000;
console.log(JSON.stringify({ rate, p50: centile(0.5), p99: centile(0.99), "asker's cpu": (user + system) / done }));
await gdn.close();
