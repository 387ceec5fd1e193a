// Asks the pure module waterfall.js. Standard input is a list of questions, standard output the list of answers.
import { readFileSync } from "node:fs";

const [module] = process.argv.slice(2);
const { barsOf, rowsOf, scaleOf, shownOf, timesOf, usedBy } = await import(module);

const answers = {
  rows: ({ trace, now }) => rowsOf(trace, now).map(({ node, turn, step, ...row }) => ({ ...row, used: usedBy({ node, turn, step, ...row }) })),
  times: ({ trace, now }) => timesOf(rowsOf(trace, now)),
  places: ({ trace, now, times }) => {
    const scale = scaleOf(rowsOf(trace, now));
    return { from: scale.from, to: scale.to, gaps: scale.gaps, places: times.map(scale.at), back: times.map(scale.at).map(scale.back) };
  },
  shown: ({ trace, now, folded, words }) => {
    const rows = rowsOf(trace, now);
    return shownOf(rows, new Set(folded), words).map((index) => rows[index].name);
  },
  bars: ({ trace, now, view, width }) => {
    const rows = rowsOf(trace, now);
    return barsOf(rows[0].segments, scaleOf(rows), view, width);
  },
  quick: ({ trace, now, words }) => {
    const took = [0, 1, 2, 3, 4].map(() => {
      const before = process.cpuUsage();
      const rows = rowsOf(trace, now);
      scaleOf(rows);
      const read = process.cpuUsage(before);
      const again = process.cpuUsage();
      shownOf(rows, new Set(), words);
      const found = process.cpuUsage(again);
      return [rows.length, (read.user + read.system) / 1000, (found.user + found.system) / 1000];
    });
    return { rows: took[0][0], rowsMs: Math.min(...took.map(([, ms]) => ms)), foundMs: Math.min(...took.map(([, , ms]) => ms)) };
  },
};
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(({ ask, ...of }) => answers[ask](of))));
