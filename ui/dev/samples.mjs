/** Twenty thousand samples of the last steps, made one by one from their numbers, so that nothing need be kept. */
import { normal, pick, randomOf } from "./random.mjs";

const PER_GROUP = 8;
const GROUPS = 32;
const STEPS = 80;
const PIECES = " so we have then the number of is equal to and each plus minus times 3 7 12 48 = x y because let us check that it follows from total there are half more than left over first second therefore".split(" ").filter(Boolean);
const edges = Array.from({ length: 21 }, (_, at) => at / 20);

function itemOf(found, step, group, sample) {
  const random = randomOf(found.seed * 1e6 + step * 4096 + group * 64 + sample);
  const row = found.rows[step - 1];
  const hard = randomOf(step * 977 + group)();
  const right = random() < row.reward_mean * 1.5 * (1 - hard * 0.7);
  const cut = random() < row.cut_off_ratio;
  const quarantined = random() < 0.0015;
  const tokens = cut ? 1024 : Math.max(24, Math.round(row.completion_tokens_mean * (1 + 0.35 * normal(random))));
  const moved = random() < 0.2;
  const joint = Math.round(tokens * (0.2 + 0.6 * random()));
  const at = Math.floor(random() * 4);
  const first = { apples: 4 + (group % 9), price: 3 + (step % 7) };
  return {
    step, group: step * 100 + group, sample,
    reward: quarantined ? null : cut ? 0 : right ? 1 : random() < 0.3 ? Number((0.1 + 0.4 * random()).toFixed(3)) : 0,
    more: { format: random() < 0.9 ? 1 : 0, extracted: right ? String(first.apples * first.price) : "17" },
    outcome: quarantined ? "quarantined" : hard > 0.96 ? "stale" : "trained",
    finish_reason: cut ? "length" : "stop",
    prompt: `Natalia sold ${first.apples} boxes of apples for ${first.price} coins each, and half as many boxes of pears for the same price. How many coins did she earn from the apples alone?`,
    answer: "",
    right_answer: String(first.apples * first.price),
    prompt_tokens: 120 + (group % 30), tokens,
    versions: moved ? [[Math.max(0, step - 2), 0, joint], [step - 1, joint, tokens]] : [[step - 1, 0, tokens]],
    instances: moved ? [[`rollout-${at}`, 0, joint], [`rollout-${(at + 1) % 4}`, joint, tokens]] : [[`rollout-${at}`, 0, tokens]],
    quarantined,
    session: null,
  };
}

/** The last sample of each group is a row of two turns. */
function sessionOf(item) {
  const [drawn, put] = [Math.floor(item.tokens / 2), Math.floor(item.tokens / 2) + 6];
  const part = (turn, is, start, end) => ({ turn, drawn: is, trained: is, start, end, versions: is ? item.versions.map(([one]) => one) : [], instances: is ? item.instances.map(([one]) => one) : [], waited_s: is ? null : 0.34, text: is ? "12 times 3 is <calculate>12*3</calculate>" : "36" });
  return {
    session: { outcome: "truncated", reason: "it had its 2 turns", turns: 2, turns_here: 2, tool_s: 0.34, engine_s: 4.1, sentence: "A row of rollout 7 with 2 turns; ended as truncated: it had its 2 turns; 0.34 s between turns with its agent and tools, 4.10 s in turns" },
    conversation: [part(1, true, 0, drawn), part(2, false, drawn, put), part(2, true, put, item.tokens)],
    mask: Array.from({ length: item.tokens }, (_, at) => at < drawn || at >= put),
  };
}

function piecesOf(item, random) {
  return Array.from({ length: item.tokens }, (_, at) => (at === 0 ? "To" : at % 37 === 36 ? "\n" : at % 11 === 10 ? "," : ` ${pick(random, PIECES)}`));
}

function withAnswer(found, item) {
  return { ...item, answer: piecesOf(item, randomOf(found.seed + item.group * 64 + item.sample)).join("").slice(0, 2000) };
}

export function stepsOf(found) {
  const last = found.rows.length;
  const steps = Array.from({ length: Math.min(STEPS, last) }, (_, at) => ({ step: last - Math.min(STEPS, last) + 1 + at, samples: GROUPS * PER_GROUP, groups: GROUPS, bytes: 1_900_000 }));
  return { steps, quarantined: 31 };
}

function* everyOne(found) {
  for (const { step } of stepsOf(found).steps) for (let group = 0; group < GROUPS; group++) for (let sample = 0; sample < PER_GROUP; sample++) yield itemOf(found, step, group, sample);
}

function comparison(text, value) {
  const [, sign, number] = /^(<=|>=|<|>|=)?\s*(-?[\d.]+)$/.exec(text) ?? [];
  if (number === undefined || value === null) return false;
  const limit = Number(number);
  return { "<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit }[sign] ?? value === limit;
}

const all = (text, value) => (text ?? "").split(",").every((part) => part === "" || comparison(part, value));

const cache = new Map();

export function samplesOf(found, query) {
  const key = `${found.job.name}?${[...query].filter(([name]) => name !== "limit" && name !== "offset").join("&")}`;
  if (!cache.has(key)) {
    const asked = (name) => query.get(name);
    let list = [...everyOne(found)].filter(
      (one) =>
        (!asked("step") || one.step === Number(asked("step"))) && (!asked("group") || one.group === Number(asked("group"))) &&
        (!asked("outcome") || (one.outcome === asked("outcome") || one.finish_reason === asked("outcome"))) && (!asked("instance") || one.instances.some(([name]) => name === asked("instance"))) &&
        (!asked("version") || one.versions.some(([number]) => number === Number(asked("version")))) && (!asked("quarantined") || one.quarantined === (asked("quarantined") === "true")) &&
        all(asked("reward"), one.reward) && all(asked("tokens"), one.tokens),
    );
    const counts = Array.from({ length: 20 }, () => 0);
    for (const one of list) if (one.reward !== null) counts[Math.min(19, Math.floor(one.reward * 20))] += 1;
    const order = asked("order") ?? "step";
    if (order === "worst") list.sort((a, b) => (a.reward ?? -1) - (b.reward ?? -1));
    else if (order === "best") list.sort((a, b) => (b.reward ?? -1) - (a.reward ?? -1));
    else list = list.reverse();
    if (cache.size > 30) cache.clear();
    cache.set(key, { list, histogram: { edges, counts } });
  }
  const { list, histogram } = cache.get(key);
  const offset = Number(query.get("offset") ?? 0);
  const limit = Number(query.get("limit") ?? 100);
  return { samples: list.slice(offset, offset + limit).map((one) => withAnswer(found, one)), total: list.length, histogram };
}

export function tokensOf(found, step, group, sample) {
  const item = itemOf(found, step, group - step * 100, sample);
  const random = randomOf(found.seed + item.group * 64 + item.sample);
  const pieces = piecesOf(item, random);
  const logprobs = pieces.map(() => Number((-Math.abs(normal(random)) * (random() < 0.12 ? 2.4 : 0.25)).toFixed(4)));
  const prompt = item.prompt.split(/(?= )/);
  return {
    ...item, answer: pieces.join(""), prompt_ids: prompt.map((_, at) => 100 + at), prompt_pieces: prompt, token_ids: pieces.map((_, at) => 900 + at), pieces, logprobs,
    trainer_logprobs: logprobs.map((one) => Number((one + normal(random) * (random() < 0.02 ? 0.6 : 0.02)).toFixed(4))), ref_logprobs: logprobs.map((one) => Number((one - 0.3 * random()).toFixed(4))),
    advantage: Number(((item.reward ?? 0) - 0.41).toFixed(3)), mask: pieces.map((_, at) => (at % 190 > 176 ? 0 : 1)), meta: { prompt_row: 4211, seed: 7, temperature: 1 },
    ...(item.sample === PER_GROUP - 1 ? sessionOf(item) : { conversation: [] }),
  };
}

/** Of each evaluation thirty-two prompts, which learn at different speeds. */
export function heldOutSetsOf(found) {
  return { sets: Object.entries(found.evaluations).map(([set, list]) => ({ set, versions: list.map((one) => one.version) })).filter((one) => one.versions.length > 0) };
}

export function heldOutOf(found, set, query) {
  const versions = heldOutSetsOf(found).sets.find((one) => one.set === set)?.versions ?? [];
  if (versions.length === 0) return null;
  const version = Number(query.get("version") ?? versions.at(-1));
  const against = query.has("against") ? Number(query.get("against")) : null;
  const side = (of, place) => {
    const item = itemOf(found, Math.max(1, of), place, 0);
    const right = randomOf(place * 7919)() < of / (versions.at(-1) + 1) ? 1 : 0;
    return { count: 1, right, reward: right, samples: [withAnswer(found, { ...item, reward: right, outcome: "evaluated" })] };
  };
  const prompts = Array.from({ length: GROUPS }, (_, place) => {
    const now = side(version, place);
    const before = against === null ? null : side(against, place);
    const difference = before ? now.right - before.right : 0;
    const { prompt, right_answer } = now.samples[0];
    return { prompt_number: place, prompt, right_answer, changed: difference !== 0, difference, now, before };
  });
  const changed = prompts.filter((one) => one.changed);
  const all = [...changed, ...prompts.filter((one) => !one.changed)];
  return { set, version, against, total: all.length, changed: changed.length, better: changed.filter((one) => one.difference > 0).length, unmatched: 0, prompts: all.slice(0, Number(query.get("limit") ?? 50)) };
}
