// One browser for many tests, with its security on. A line on standard input has the steps of one, a line on standard
// output what it has seen. Steps are the body of a function of `page` (the first tab) and `it`:
//   it.args           what the test has given
//   it.tab(route)     one more tab of the same browser profile
//   it.settled(page)  a moment in which the page has drawn what it has heard
//   it.text(page)     what the page shows
//   it.findings(page) what axe-core finds serious or worse
//   it.told()         the next line of the test, for steps that go on beside it
//   it.say(value)     one more line for the test
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const Steps = Object.getPrototypeOf(async () => {}).constructor;
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const profile = mkdtempSync(join(tmpdir(), "profile-"));
const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(),
  headless: "shell",
  userDataDir: profile,
  args: ["--no-sandbox", "--disable-gpu"],
  pipe: true, // who dies without a goodbye takes its browser along
});

/** Notes what a tab or a worker asks for, what its policy forbids, and what goes wrong in it. */
async function watch(client, seen) {
  const asked = new Map();
  client.on("Network.requestWillBeSent", ({ requestId, request }) => {
    asked.set(requestId, request.url);
    seen.requests.push(request.url);
  });
  client.on("Network.loadingFailed", ({ requestId, blockedReason }) => {
    if (blockedReason) seen.requests.splice(seen.requests.indexOf(asked.get(requestId)), 1); // it did not go out
  });
  client.on("Audits.issueAdded", ({ issue }) => {
    if (issue.code !== "ContentSecurityPolicyIssue") return;
    const { violatedDirective, blockedURL, contentSecurityPolicyViolationType: type } = issue.details.contentSecurityPolicyIssueDetails;
    seen.violations.push(`${violatedDirective} ${blockedURL ?? type}`);
  });
  client.on("Runtime.exceptionThrown", ({ exceptionDetails: { exception, text } }) => seen.errors.push(exception?.description ?? text));
  client.on("Runtime.consoleAPICalled", ({ type, args }) => {
    if (type === "error") seen.errors.push(args.map((one) => one.description ?? String(one.value)).join(" "));
  });
  await Promise.all(["Network.enable", "Audits.enable", "Runtime.enable"].map((one) => client.send(one).catch(() => {})));
}

async function run({ address, route, steps, size, dark, args, entered }) {
  const seen = { violations: [], errors: [], requests: [] };
  const context = await browser.createBrowserContext();
  context.on("targetcreated", async (target) => {
    if (target.type() === "shared_worker") await watch((await target.worker()).client, seen).catch(() => {});
  });
  const tab = async (where = "") => {
    const page = await context.newPage();
    page.setDefaultTimeout(15000);
    await watch(await page.createCDPSession(), seen);
    await page.setViewport({ width: size[0], height: size[1] });
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }]);
    await page.goto(address + where);
    return page;
  };
  const it = {
    args, context, address, tab, seen,
    settled: (page) => page.evaluate(() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done)), 50))),
    text: (page) => page.evaluate(() => document.body.innerText),
    told: async () => JSON.parse((await lines.next()).value),
    say: (value) => console.log(JSON.stringify(value)),
    findings: async (page) => {
      await page.evaluate(AXE);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      const bad = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
      return bad.flatMap(({ id, nodes }) => nodes.slice(0, 5).map(({ html, failureSummary }) => `${id}: ${html.slice(0, 200)} ${failureSummary}`));
    },
  };
  try {
    const page = await tab(route);
    if (entered) await page.waitForSelector("main#content");
    seen.value = (await new Steps("page", "it", steps)(page, it)) ?? null;
  } catch (error) {
    seen.failed = error.stack;
    seen.value = await context.pages().then((pages) => it.text(pages[0])).catch(() => null);
  } finally {
    await context.close();
  }
  return seen;
}

console.log(JSON.stringify({ version: await browser.version() }));
for await (const line of lines) console.log(JSON.stringify(await run(JSON.parse(line))));
await browser.close();
rmSync(profile, { recursive: true, force: true });
