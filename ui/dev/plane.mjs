/** Engines, machines, account, graph and logs of a made-up job. */
const edge = (source, target, kind, produce, consume, delay, capacity) => ({ source, target, kind, produce, consume, delay, capacity });
const operator = (ref) => ({ ref, role: ref.split(".")[0], method: ref.split(".")[1], dispatch: "plane", ordered: false, initial_policy: false });

export function graphOf(found) {
  return {
    name: found.job.name, recipe: "grpo", nodes: { count: 3, devices: 8, device_type: "GPU" },
    roles: Object.entries(found.job.roles).map(([name, total]) => ({ name, entrypoint: `gyre.workloads.${name}`, total, gang: name === "actor", elastic: name === "rollout" ? { min: 1, max: 8 } : null })),
    operators: ["trainer.prompts", "rollout.generate", "reward.score", "actor.accumulate", "actor.apply", "rollout.evaluate"].map(operator),
    edges: [
      edge("trainer.prompts", "rollout.generate", "samples", 32, 32, 0, 384), edge("rollout.generate", "reward.score", "samples", 32, 32, 0, 384),
      edge("reward.score", "actor.accumulate", "samples", 32, 64, 0, 384), edge("actor.accumulate", "actor.apply", "control", 1, 2, 0, null),
      edge("actor.apply", "rollout.generate", "weights", 4, 1, 2, null), edge("actor.apply", "rollout.evaluate", "weights", 1, 10, 10, null),
    ],
    role_edges: [], cycles: [], regions: { joined: [], single: 5 }, sub_graphs: [], placement: [], notes: [],
  };
}

export function enginesOf(found) {
  const rollouts = found.vertices.filter((one) => one.role === "rollout");
  return {
    engines: rollouts.map((one, at) => ({
      instance: one.id, engine: "sglang", node: one.node, state: found.job.ended_at ? "cut" : at % 4 === 2 ? "cut" : at % 4 === 3 ? "loading" : "working", version: found.job.version - (at % 4 === 3 ? 1 : 0),
      not_admitted: at % 4 === 2 ? "engine" : at % 4 === 3 ? "loading" : "", samples: at % 4 === 2 ? 0 : 34, running: at % 4 === 2 ? 0 : 31, tokens: 9_100_000 + at * 81_000, rate_tokens_s: at % 4 === 2 ? 0 : 1810.4 + 33 * (at % 7), max_running: 48,
      kv_used_tokens: 151_000, kv_tokens: 212_000, limits_why: "SGLang's own --max-running-requests", loads: at % 4 === 1 ? "disk" : "loader", loads_why: at % 4 === 1 ? "the engine has no loader of Gyre's: an older SGLang" : "", transport: at % 2 ? "tcp" : "mooncake", codec: "delta+zstd", transfer_why: "fastest of those both have", silent_s: at % 4 === 2 ? 41.2 : 0.4,
    })),
    pools: { rollout: { instances: rollouts.length, price_per_hour: 1.9, rate_tokens_s: 1840, price_per_million_tokens: 0.2868 } },
    door: {
      url: "http://10.0.0.7:7171",
      open: 12,
      kept: 340,
      waiting: 9,
      requests: {
        answered: 4120, failed: 3, tokens: 1_950_000, median_s: 4.2, slow_s: 21,
        keys: { lab: { answered: 4000, failed: 1, tokens: 1_900_000 }, other: { answered: 120, failed: 2, tokens: 50_000 } },
      },
    },
    sessions: {
      waiting: 20, running: 12, at_engine: 5, with_agent: 7, ended: 3, turns: 61, workers: 2, failed_groups: 0, pause_s: 0, branches: { template: 2 },
      since_start: {
        outcomes: { scored: 200, truncated: 25, policy_fault: 5, infra_fault: 3 }, turns: 870, drawn_again: 3,
        faults: [{ session: "train-17-3-0", reason: "the sandbox did not answer within 60 s" }, { session: "train-16-0-1", reason: "the grader has no GPU" }],
      },
      sentence: "12 sessions run on 2 workers: 5 at an engine, 7 with an agent or its tools. 20 sessions wait for an agent. Since the manager started 233 sessions ended, 200 scored, 25 cut off at a limit, 5 for a fault of the policy, 3 for a fault of infrastructure; 3 were drawn again; 870 turns were answered. Branches: 2 by template. The newest fault, of train-17-3-0: the sandbox did not answer within 60 s",
    },
  };
}

export function nodesOf(found) {
  const names = [...new Set(found.vertices.map((one) => one.node))];
  return {
    nodes: names.map((id, at) => ({ id, ip: `10.0.0.${at + 4}`, there: true, cpu: 96, gpu: 8, memory_bytes: 1e12, vertices: found.vertices.filter((one) => one.node === id).map((one) => one.id), deaths: at === 2 ? 2 : 0, left_until: null, found: "", draining: at === 1 ? "spot notice" : "" })),
  };
}

export function accountOf(found) {
  const steps = found.rows.length;
  const delivered = found.rows.reduce((sum, row) => sum + row.tokens, 0);
  const discarded = { stale: 211_030, no_gradient: 1_830_112, quarantined: 4096 };
  const inFlight = found.job.ended_at ? 0 : 118_402;
  return {
    prompts: { drawn: steps * 32 + 88, trained: steps * 32, dropped: 24, in_flight: found.job.ended_at ? 0 : 64, lost: 0, twice: 0 },
    tokens: { generated: delivered + inFlight + 211_030 + 1_830_112 + 4096, delivered, in_flight: inFlight, waiting: found.job.ended_at ? "in flight when the job ended" : "in flight", told: "The rollout manager said so last.", discarded, missing: 0 },
    money: [{ role: "rollout", instances: 4, price_per_hour: 1.9, price_per_million_tokens: 0.2868 }, { role: "actor", instances: 4, price_per_hour: 2.4, price_per_million_tokens: null }],
  };
}

const SENTENCES = {
  live: ["The trainer waits for 37 samples of step 301; rollout-3 holds 22 of them, the oldest for 4 m 10 s.", "attention", "yes", "the reward rose from 0.14 to 0.71 in 300 steps"],
  large: ["All is well: step 300, and 7 499 instances generate.", "good", "yes", "the reward rose from 0.14 to 0.71 in 300 steps"],
  good: ["The job ended well after 280 steps; held-out accuracy rose from 0.15 to 0.64.", "over", "yes", "the reward rose from 0.13 to 0.70"],
  bad: ["The job failed at step 160: the reward function raised KeyError: 'answer' (reward.py:41).", "bad", "no", "the reward has not risen for 80 steps"],
};

const SLOW = ["the actor waits 36 % of its time for samples", "the actor waited 36 % of its time for samples"];

export function nowOf(found) {
  const [sentence, tone, verdict, because] = SENTENCES[found.kind];
  const last = found.rows.at(-1);
  return {
    sentence, tone, learns: { verdict, words: verdict === "yes" ? "It learns" : "It does not learn so far", tone: verdict === "yes" ? "good" : "bad", because, beside: found.kind === "bad" ? ["since step 120: the reward has not risen for 80 steps"] : [] },
    slow: { what: "rollout", because: SLOW[found.job.ended_at ? 1 : 0], words: `rollout: ${SLOW[found.job.ended_at ? 1 : 0]}.` },
    facts: [
      { label: "step", value: `${found.rows.length} of 400`, view: "curves" }, { label: "reward", value: `${last.reward_mean} ±${last.reward_std}`, view: "curves" },
      { label: "speed", value: `${Math.round(last.tokens_per_s)} tokens/s`, view: "timeline" }, { label: "instances", value: "3 of 4 work", view: "fleet" },
      { label: "version", value: `${found.job.version}, 1 behind`, view: "weights" }, { label: "checkpoint", value: `step ${found.job.checkpoint_step}, 4 m ago`, view: "timeline" },
    ],
  };
}

export function logsOf(found, query) {
  const role = query.get("role");
  const rank = query.get("rank");
  const chosen = found.vertices.filter((one) => (!role || one.role === role) && (rank === null || one.rank === Number(rank))).slice(0, 8);
  const level = query.get("level") ?? "D";
  const grep = query.get("grep") ? new RegExp(query.get("grep")) : null;
  const since = Number(query.get("since") ?? 0);
  const line = (one, at, letter, text) => ({ at, level: letter, vertex: one.id, incarnation: one.incarnation, file: `${one.id}.${one.incarnation}.log`, text });
  const of = (row) => `step ${row.step}/400  reward ${row.reward_mean} ±${row.reward_std}  loss ${row.loss}  ${Math.round(row.tokens_per_s)} tok/s`;
  const lines = chosen.flatMap((one, place) => [
    ...found.rows.slice(-60).map((row) => line(one, row.at + place / 100, "I", of(row))),
    ...(one.rank === 2 ? [line(one, found.rows.at(-1).at + 1, "E", "torch.OutOfMemoryError: CUDA out of memory"), line(one, found.rows.at(-1).at + 1, "W", "the optimizer skips this step")] : []),
  ]);
  return {
    lines: lines.filter((one) => "DIWE".indexOf(one.level) >= "DIWE".indexOf(level) && (!grep || grep.test(one.text)) && one.at >= since).sort((one, other) => one.at - other.at),
    cursor: "c1", more: false, searched_from: found.rows.at(-60)?.at ?? null, missing: [],
  };
}

export function specOf(found) {
  const bad = found.kind === "bad";
  return { name: found.job.name, config: { reward: { functions: [{ function: "math_verify", name: "right" }, { function: "rewards/mine.py:format", weight: 0.2 }] }, algorithm: bad ? "ppo" : "grpo", loss: { clip: 0.2, kl_loss_coef: bad ? 0.01 : 0.001 }, optim: { lr: bad ? 5e-6 : 1e-6 }, sampling: { temperature: 1, group: 8 }, model: "Qwen3-0.6B" }, store: { url: `sqlite:///${found.job.name}` } };
}
