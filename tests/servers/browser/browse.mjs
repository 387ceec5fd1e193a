// Opens a page in a real browser, with its security on, and prints what the page says when it is done.
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [url] = process.argv.slice(2);
const profile = mkdtempSync(join(tmpdir(), "profile-"));
const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(),
  headless: "shell",
  userDataDir: profile,
  args: ["--no-sandbox", "--disable-gpu"],
  pipe: true, // who dies without a goodbye takes its browser along
});
try {
  const page = await browser.newPage();
  await page.goto(url);
  await page.waitForFunction("window.done !== undefined", { timeout: 30000 });
  console.log(JSON.stringify({ version: await browser.version(), done: await page.evaluate("window.done") }));
} finally {
  await browser.close();
  rmSync(profile, { recursive: true, force: true });
}
