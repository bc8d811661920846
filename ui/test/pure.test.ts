/** What is pure: formats, thinning, the address, rows and windows of the timeline, scales of tokens. */
import { describe, expect, it, vi } from "vitest";
import { smoothed, thinned, within } from "../src/data/thinning";
import { bytes, duration, percent, percentTick, plusMinus, short, tick, whole, wholeTick } from "../src/format";
import { heightOf, labelsOf, moments } from "../src/parts/axes";
import { pathOf } from "../src/parts/Sparkline";
import { hrefOf, parseRoute } from "../src/route";
import { promiseOf } from "../src/views/account/promise";

import { differences } from "../src/views/compare/differences";
import { heldOutLines } from "../src/views/compare/heldOutLines";
import { MOST_RUNS, strokeClass, strokesOf, type Run } from "../src/views/compare/runs";
import { jobIn, keyIn } from "../src/data/jobKeys";
import { heightFor } from "../src/views/jobs/height";
import { againstOf } from "../src/views/samples/against";
import { binCondition } from "../src/views/samples/filters";
import { columnsOf, firstAfter, rolesOf, rowsOf, spanAt, sumsOf } from "../src/views/timeline/rows";
import { asked, clamped, zoomed } from "../src/views/timeline/window";
import { passedOn, rolloutsOf } from "../src/views/samples/rollouts";
import { headOf, marksOf } from "../src/views/tokens/conversation";
import { jointsOf, scaleOf, seesLoss } from "../src/views/tokens/scales";
import type { ConversationPart, LaneSchema, SampleItem, SampleTokens } from "../src/rest";

/** As they read: between a number and its unit stands a space at which no line breaks. */
const read = (text: string): string => text.replaceAll("\u00a0", " ");

describe("formats", () => {
  it("writes numbers short", () => {
    expect([0, 0.7194, 9.8e-4, 1e-6, 41.234, 9949, 45_352_064, -0.5, null, Infinity].map((value) => read(short(value)))).toEqual(["0", "0.719", "9.8e−4", "1.0e−6", "41.2", "9949", "45.4 M", "−0.500", "–", "–"]);
  });

  it("writes ticks in as many digits as tell them apart", () => {
    expect([0.25, 0.5, 0.75].map((value) => tick(value, 0.25))).toEqual(["0.25", "0.50", "0.75"]);
    expect([5e-7, 1e-6].map((value) => tick(value, 5e-7))).toEqual(["5e−7", "1e−6"]);
    expect([0.02, 0.04].map((value) => read(percentTick(value, 0.02)))).toEqual(["2 %", "4 %"]);
  });

  it("writes no deviation that is rounding", () => {
    expect([plusMinus(0.4, 1.1e-16), plusMinus(0.4, 0.02), plusMinus(0, 0), plusMinus(1, null)]).toEqual(["0.400 ±0", "0.400 ±0.0200", "0 ±0", "1"]);
  });

  it("writes spans of time in two units", () => {
    expect([0, 0.34, 9.3, 59.4, 250, 7500, 277_200, -5].map((value) => read(duration(value)))).toEqual(["0 s", "0.34 s", "9.3 s", "59 s", "4 min 10 s", "2 h 5 min", "3 d 5 h", "−5.0 s"]);
  });

  it("writes whole numbers, shares and bytes", () => {
    expect([whole(20480), percent(0.362), percent(0.014), bytes(988e6)].map(read)).toEqual(["20\u202f480", "36 %", "1.4 %", "988 MB"]);
  });
});

describe("the height of a chart", () => {
  const share = (low: number, high: number, known?: number): number => {
    const [bottom, top] = heightOf(low, high, known);
    expect(bottom).toBeLessThan(top);
    expect(bottom).toBeLessThanOrEqual(low);
    expect(top).toBeGreaterThanOrEqual(high);
    return (high - low) / (top - bottom);
  };

  it("is that of the numbers, where they tell themselves apart", () => {
    expect(heightOf(0.5, 1).map((value) => value.toFixed(6))).toEqual(["0.460000", "1.040000"]);
    expect([share(0, 1e-6), share(0.7, 0.70001), share(-3, 5), share(1e9, 2e9), share(1e-8, 2e-8, 5e-13)].every((one) => one > 0.8)).toBe(true);
  });

  it("makes no curve of rounding, in whatever unit", () => {
    expect(share(8e-15, 2e-14, 5e-13)).toBeLessThan(0.001); // a KL of log-probs that are the same but for rounding
    expect(share(-3e-13, 2e-13)).toBeLessThan(0.01);
    for (const size of [1e-6, 0.7, 41, 3e9]) expect(share(size, size * (1 + 2 ** -24))).toBeLessThan(0.01); // a constant that went through float32
    expect(pathOf([0.7, 0.7 + 1e-9, 0.7]).match(/[\d.]+(?=[ML]|$)/g)).toEqual(["20.0", "20.0", "20.0"]);
  });

  it("has a constant in the middle, and nought on the ground", () => {
    expect([heightOf(3, 3), heightOf(-2, -2), heightOf(0, 0), heightOf(null, null)]).toEqual([[1.5, 4.5], [-3, -1], [0, 1], [0, 1]]);
    expect(heightOf(8e-15, 8e-15, 5e-13)).toEqual([0, 5e-11]);
  });

  it("has no two ticks alike, however little is between them", () => {
    const steps = [0.7, 45_352_000, 1e-6, -3].flatMap((size) => [1e-5, 1e-3, 0.1].map((part) => [size, Math.abs(size) * part] as const));
    for (const [size, step] of steps) {
      const labels = labelsOf([0, 1, 2, 3].map((at) => size + at * step), (value) => tick(value, step));
      expect(new Set(labels).size).toBe(4);
    }
    expect([1, 1.5, 2].map(wholeTick)).toEqual(["1", "", "2"]);
  });
});

describe("the moments of an axis", () => {
  const zones = ["UTC", "Europe/Berlin", "Asia/Kolkata", "America/St_Johns"];
  const starts = [Date.UTC(2026, 10, 28, 13, 5, 7), Date.UTC(2026, 9, 24, 22, 0, 1), Date.UTC(2026, 11, 31, 20)].map((at) => at / 1000);
  const lengths = [0.05, 0.7, 3, 20, 59, 600, 5400, 40_000, 200_000, 3e6, 4e7, 4e8];

  it("are round, not too many, and no two of them are called alike", () => {
    try {
      for (const of of zones) {
        vi.stubEnv("TZ", of);
        for (const start of starts) for (const length of lengths) for (const most of [3.5, 9, 14]) {
          const found = moments(start, start + length, most);
          expect(found.length).toBeLessThanOrEqual(most + 1);
          expect(found.length).toBeGreaterThan(0);
          expect(found.every(({ at }) => at >= start - 1e-6 && at <= start + length + 1e-6)).toBe(true);
          const labels = found.map((one) => one.label).filter(Boolean);
          expect([of, start, length, most, labels.length - new Set(labels).size]).toEqual([of, start, length, most, 0]);
        }
      }
    } finally {
      vi.unstubAllEnvs();
    }
  });

  it("are as fine as the run is short", () => {
    const at = new Date(2026, 10, 28, 13, 5, 7).getTime() / 1000;
    const labels = (length: number): string[] => moments(at, at + length, 6).map((one) => one.label);
    expect(labels(20)).toEqual(["13:05:10", "13:05:15", "13:05:20", "13:05:25"]);
    expect(labels(0.25).slice(0, 2)).toEqual(["13:05:07.00", "13:05:07.05"]);
    expect(labels(2.5).slice(0, 2)).toEqual(["13:05:07.0", "13:05:07.5"]);
    expect(labels(4000)).toEqual(["13:15", "13:30", "13:45", "14:00"]);
    expect(labels(2.5 * 86400).slice(0, 2)).toEqual(["11-29 00:00", "11-29 12:00"]);
    expect(labels(10 * 86400).slice(0, 2)).toEqual(["11-29", "12-01"]);
  });
});

describe("the promise", () => {
  const prompts = { drawn: 0, trained: 0, dropped: 0, in_flight: 0, lost: 0, twice: 0 };
  const tokens = { generated: null, delivered: null, in_flight: null, discarded: {}, missing: null, waiting: "in flight", told: "", not_trained: {} };
  const told = (p: Partial<typeof prompts>, t: object = {}) => {
    const { tone, words } = promiseOf({ prompts: { ...prompts, ...p }, tokens: { ...tokens, ...t } });
    return `${tone}: ${read(words)}`;
  };

  it("is kept where there was something to lose, and of nothing it says nothing", () => {
    expect([told({ drawn: 512 }), told({}), told({}, { generated: 0, missing: 0 }), told({}, { generated: 9000, missing: 0 })]).toEqual(["good: 0 lost, 0 twice", "over: nothing drawn yet", "over: nothing drawn yet", "good: 0 of 9000 tokens missing"]);
  });

  it("is broken by one prompt or token, whatever else there is", () => {
    expect([told({ drawn: 512, lost: 1 }), told({ drawn: 512, twice: 2 }), told({ lost: 1 }), told({ drawn: 512 }, { generated: 9, missing: 3 }), told({}, { generated: 9, missing: 3 })]).toEqual(["bad: 1 lost, 0 twice", "bad: 0 lost, 2 twice", "bad: 1 lost, 0 twice", "bad: 0 lost, 0 twice", "bad: 3 of 9 tokens missing"]);
  });
});

describe("thinning", () => {
  it("keeps every spike, in order", () => {
    const x = Array.from({ length: 10_000 }, (_, at) => at);
    const y = x.map((at) => (at === 7777 ? 100 : at === 1234 ? -100 : 0));
    const few = thinned(x, y, 200);
    expect(few.x.length).toBeLessThanOrEqual(200);
    expect(few.y).toContain(100);
    expect(few.y).toContain(-100);
    expect(few.x).toEqual([...few.x].sort((a, b) => a - b));
  });

  it("smooths over those before, and leaves gaps", () => {
    expect(smoothed([1, 3, null, 5, 7], 2)).toEqual([1, 2, null, 5, 6]);
  });

  it("finds what lies between two values", () => {
    expect(within([1, 2, 2, 3, 9], 2, 3)).toEqual([1, 4]);
  });
});

describe("the address", () => {
  it("comes back as it was written", () => {
    const href = hrefOf("a job", "samples", { reward: ">=0.2,<0.4", step: 3, group: "", at: null });
    expect(parseRoute(href)).toEqual({ job: "a job", view: "samples", params: { reward: ">=0.2,<0.4", step: "3" } });
  });

  it("is an address even when it was cut", () => {
    expect(parseRoute("#/jobs/%E0%A4%A/now").view).toBe("now");
    expect(parseRoute("")).toEqual({ job: "", view: "jobs", params: {} });
  });
});

const LANES: LaneSchema[] = [
  { id: "rollout-0", role: "rollout", kind: "instance", spans: [[0, 10, "generate", ""], [10, 14, "idle", ""], [20, 30, "generate", ""]] },
  { id: "rollout-1", role: "rollout", kind: "instance", spans: [[0, 30, "down", "process_died"]] },
  { id: "trainer-0", role: "trainer", kind: "vertex", spans: [] },
];

describe("the timeline", () => {
  it("sums what lies within the window", () => {
    expect(sumsOf(LANES, { from: 5, to: 22 })).toEqual({ generate: 7, idle: 4, down: 17 });
  });

  it("splits the same sums into columns", () => {
    const columns = columnsOf(LANES, { from: 5, to: 22 }, 17);
    const sum = (state: "generate" | "down"): number => columns.reduce((all, one) => all + (one[state] ?? 0), 0);
    expect(sum("generate")).toBeCloseTo(7);
    expect(sum("down")).toBeCloseTo(17);
  });

  it("finds spans, and gaps", () => {
    const [lane] = LANES as [LaneSchema];
    expect(spanAt(lane, 12)?.[2]).toBe("idle");
    expect(spanAt(lane, 17)).toBeUndefined();
    expect(firstAfter(lane.spans, 100)).toBe(3);
  });

  it("gives a role of one lane no row of its own, and closes roles that were turned", () => {
    const roles = rolesOf(LANES);
    expect(rowsOf(roles, new Set()).map((row) => row.kind)).toEqual(["role", "lane", "lane", "lane"]);
    expect(rowsOf(roles, new Set(["rollout"])).map((row) => row.kind)).toEqual(["role", "lane"]);
  });

  it("zooms around a moment and stays within its bounds", () => {
    const bounds = { from: 0, to: 100 };
    expect(zoomed({ from: 0, to: 100 }, 50, 0.5, bounds)).toEqual({ from: 25, to: 75 });
    expect(clamped({ from: 90, to: 140 }, bounds)).toEqual({ from: 50, to: 100 });
    const need = asked({ from: 40, to: 50 }, bounds);
    expect(need.from).toBeLessThanOrEqual(40);
    expect(need.to).toBeGreaterThanOrEqual(50);
  });
});

describe("tokens", () => {
  const sample = { token_ids: [1, 2, 3], logprobs: [-0.05, -9, null], trainer_logprobs: [-0.05, -7.5, null], advantage: 0.5, versions: [[3, 0, 2], [4, 2, 3]], instances: [["a", 0, 2], ["b", 2, 3]], mask: null } as unknown as SampleTokens;

  it("colours by what is asked for, and nothing where there is no value", () => {
    expect(scaleOf(sample, "engine").classes).toEqual(["q4", "q0", ""]);
    expect(scaleOf(sample, "difference").classes).toEqual(["q4", "q8", ""]);
    expect(scaleOf(sample, "version").classes).toEqual(["k0", "k0", "k1"]);
  });

  it("gives no advantage to what the policy did not draw", () => {
    const masked = { ...sample, mask: [false, true, true] };
    expect(scaleOf(masked, "advantage").values).toEqual([null, 0.5, 0.5]);
    expect([0, 1, 2].map((at) => seesLoss(masked, at))).toEqual([false, true, true]);
  });

  it("counts the rows of a rollout once, by the last", () => {
    const rows = [[0, null], [1, 0], [2, 1], [3, 0]].map(([at, rollout]) => ({ sample: at, rollout })) as unknown as SampleItem[];
    expect(rolloutsOf(rows.slice(1)).map((one) => one.sample)).toEqual([3, 2]);
    expect(rolloutsOf(rows.slice(0, 1))).toHaveLength(1);
  });

  it("marks where the sample went on elsewhere", () => {
    expect(jointsOf(sample)).toEqual([{ at: 2, text: "a → b, v3 → v4" }]);
  });
});

describe("runs in one chart", () => {
  it("draws no two alike", () => {
    for (const seeds of [1, 2, 3, 20]) {
      const strokes = strokesOf(Array.from({ length: MOST_RUNS }, (_, at) => `e${Math.floor(at / seeds)}`));
      expect(new Set(strokes.map((one) => JSON.stringify(one))).size).toBe(MOST_RUNS);
      expect(new Set(strokes.map((one) => one.colour + strokeClass(one))).size).toBe(MOST_RUNS);
    }
  });

  it("gives the seeds of an experiment one colour", () => {
    const colours = strokesOf(Array.from({ length: MOST_RUNS }, (_, at) => `e${at % 10}`)).map((one) => one.colour);
    for (let at = 0; at < 10; at++) expect(colours[at + 10]).toBe(colours[at]);
    expect(strokesOf(["a", undefined, undefined, "a"]).map((one) => one.colour)).toEqual(["--c1", "--c2", "--c3", "--c1"]);
  });

  it("has evaluations by version, by accuracy where one of them has it", () => {
    const of = (name: string, ...rows: [number, number | null, number][]) => ({ name, colour: "--c1", dashed: false, dotted: false, view: { evaluations: { math: rows.map(([version, accuracy, reward_mean]) => ({ version, accuracy, reward_mean })) } } }) as unknown as Run;
    const found = heldOutLines("math", [of("a", [0, 0.1, 0.5], [10, 0.2, 0.6]), of("b", [5, 0.3, 0.7]), { ...of("c"), view: undefined }]);
    expect([found.unit, found.x]).toEqual(["accuracy", [0, 5, 10]]);
    expect(found.lines.map((line) => [line.label, line.values])).toEqual([["a", [0.1, null, 0.2]], ["b", [null, 0.3, null]]]);
    expect(heldOutLines("math", [of("a", [0, null, 0.5])]).unit).toBe("reward");
  });
});

describe("names of jobs", () => {
  const list = { jobs: [{ name: "a", job_id: "a-1" }, { name: "b", job_id: "b-1" }, { name: "a", job_id: "a-2" }] as never[], shared_names: ["a"] };

  it("are ids where several share one, whatever is filtered", () => {
    expect((list.jobs as { name: string; job_id: string }[]).map(keyIn(list))).toEqual(["a-1", "b", "a-2"]);
  });

  it("mean the same job as its id", () => {
    expect(["b", "b-1", "a-2", "none"].map((key) => jobIn(list, key)?.job_id)).toEqual(["b-1", "b-1", "a-2", undefined]);
  });
});

describe("the box of the runs", () => {
  it("ends with the screen, and has all of it where it begins far down", () => {
    expect([heightFor(100, 1000), heightFor(700, 1000)]).toEqual([876, 952]);
  });
});

describe("held-out answers", () => {
  const rows = (...values: (number | null)[]) => values.map((accuracy, at) => ({ version: at * 10, accuracy, reward_mean: 0.5 }));

  it("are compared with those of the version before, or of the best where that was better", () => {
    const versions = [0, 10, 20, 30];
    expect(againstOf(versions, 30, rows(0.1, 0.5, 0.3, 0.4))).toBe(10);
    expect(againstOf(versions, 30, rows(0.1, 0.5, 0.3, 0.5))).toBe(20);
    expect(againstOf(versions, 30, [])).toBe(20);
    expect(againstOf(versions, 0, rows(0.1, 0.5, 0.3, 0.4))).toBe(10);
    expect(againstOf([0], 0, [])).toBeUndefined();
    expect(againstOf([0, 20, 30], 30, rows(0.1, 0.5, 0.3, 0.4))).toBe(20);
  });
});

describe("filters and settings", () => {
  it("gives the last bin its end", () => {
    expect([0, 1].map((at) => binCondition([0, 0.5, 1], at))).toEqual([">=0,<0.5", ">=0.5,<=1"]);
  });

  it("shows only the keys that differ", () => {
    expect(differences([{ name: "a", config: { lr: 1, seed: 7 } }, { name: "b", config: { lr: 2, seed: 7, k: [1] } }])).toEqual([
      { key: "config.k", values: ["–", "[1]"] },
      { key: "config.lr", values: ["1", "2"] },
    ]);
  });
});

describe("sessions", () => {
  const part = (more: Partial<ConversationPart>): ConversationPart => ({ turn: 2, drawn: true, trained: true, start: 4, end: 6, versions: [3, 4], instances: ["rollout-1"], waited_s: null, text: null, ...more });

  it("tells who put a part there", () => {
    expect(headOf(part({}))).toBe("Turn 2, drawn by v3, v4 on rollout-1: 2 tokens");
    expect(headOf(part({ versions: [], instances: [] }))).toBe("Turn 2, drawn by the policy: 2 tokens");
    expect(headOf(part({ trained: false, end: 5 }))).toBe("Turn 2, drawn by v3, v4 on rollout-1: 1 token, for an earlier row of the rollout");
    expect(headOf(part({ drawn: false }))).toBe("Turn 2, put there: 2 tokens");
    expect(read(headOf(part({ drawn: false, waited_s: 0.25 })))).toBe("Turn 2, put there: 2 tokens, 0.25 s after the answer before");
  });

  it("marks where turns begin, and nothing of an older master's sample", () => {
    expect(marksOf({ conversation: [part({ drawn: false, start: 2 }), part({})] } as unknown as SampleTokens)).toEqual([{ at: 2, text: "put there, turn 2" }, { at: 4, text: "turn 2" }]);
    expect(marksOf({} as SampleTokens)).toEqual([]);
  });

  it("says no joint where turns follow one another at the same instance", () => {
    const sample = { versions: [[3, 0, 2], [3, 2, 4], [4, 4, 6]], instances: [["a", 0, 2], ["a", 3, 4], ["b", 4, 6]] } as unknown as SampleTokens;
    expect(jointsOf(sample)).toEqual([{ at: 4, text: "a → b, v3 → v4" }]);
    expect(passedOn(sample.instances)).toEqual(["a", "b"]);
    expect(passedOn([])).toEqual([]);
  });
});
