/**
 * Made-up jobs: one that runs, one that ended well, one that failed, one that is large. 300 steps, twelve vertices,
 * and the incidents that a night brings.
 */
import { normal, randomOf } from "./random.mjs";

export const STEP_S = 14.2;
const round = (value, places = 4) => Number(value.toFixed(places));

function steps(seed, count, since, worse) {
  const random = randomOf(seed);
  const out = [];
  let at = since;
  for (let step = 1; step <= count; step++) {
    const learned = 1 / (1 + Math.exp(-(step - 90) / 35));
    const seconds = STEP_S + 2.2 * normal(random) ** 2 + (step % 61 === 0 ? 48 : 0);
    at += seconds;
    const length = 410 + 260 * learned + 18 * normal(random);
    const groups = 32;
    const samples = 256;
    const reward = worse ? 0.12 + 0.05 * learned : 0.14 + 0.58 * learned;
    const flat = Math.round(groups * (0.22 + 0.25 * learned * random()));
    out.push({
      step, version: step, at: round(at, 3),
      reward_mean: round(reward + 0.03 * normal(random)), reward_std: round(0.31 + 0.05 * normal(random)), reward_min: 0, reward_max: 1,
      "reward.right": round(0.9 * reward), "reward.format": round(Math.min(1, 0.7 + 0.3 * reward)),
      loss: round(0.012 * normal(random), 5), policy_loss: round(0.011 * normal(random), 5),
      kl: round(0.0004 * step ** 0.75 * (1 + 0.1 * normal(random)), 5), old_kl: round(0.0008 + 0.0004 * random(), 6),
      rollout_kl: round(0.0011 + 0.0003 * random(), 6),
      entropy: round(1.9 * Math.exp(-step / 260) + 0.22 + 0.03 * normal(random)), clipped: round(0.012 + 0.006 * random(), 5),
      grad_norm: step === 203 ? 7.9 : round(0.34 + 0.08 * Math.abs(normal(random))), lr: round(1e-6 * Math.min(1, step / 20), 9),
      tis_weight: round(0.99 + 0.01 * random()), tis_capped: round(0.004 * random(), 5),
      groups, samples, tokens: Math.round(length * samples), prompt_tokens_mean: round(132 + 6 * normal(random), 1),
      completion_tokens_mean: round(length, 1), completion_tokens_max: 1024, cut_off_ratio: round(0.05 + 0.06 * random()),
      flat_groups: flat, flat_groups_ratio: round(flat / groups), staleness_mean: round(0.7 + 0.4 * random()), staleness_max: step % 17 === 0 ? 2 : 1,
      seconds: round(seconds, 2), tokens_per_s: round((length * samples) / seconds, 1), skipped: 0, groups_skipped: 0,
      my_format_reward: round(0.4 + 0.5 * learned + 0.02 * normal(random)),
    });
  }
  return out;
}

const ROLES = [["trainer", 1], ["actor", 4], ["reward", 2], ["rollout_manager", 1], ["rollout", 4]];

function vertices(start, count, roles) {
  const out = [];
  for (const [role, total] of roles) {
    for (let rank = 0; rank < total; rank++) {
      out.push({
        id: `${role}-${rank}`, role, rank, pid: 4000 + out.length, node: `node-${(out.length % count) + 1}`, phase: "running", reason: "", message: "",
        incarnation: role === "rollout" && rank === 2 ? 4 : 1, restarts: role === "rollout" && rank === 2 ? 3 : 0, since: start + 12 + out.length,
        no_room: "", no_room_since: 0, silent: "", silent_since: 0, false_alarms: role === "actor" && rank === 1 ? 2 : 0, version: role === "rollout" ? 300 : null, fields: {},
        busy: { trainer: "waiting for rollout", actor: "training", reward: "", rollout_manager: "", rollout: "generating" }[role] ?? "",
      });
    }
  }
  return out;
}

function incidents(rows) {
  const at = (step) => rows[Math.min(step, rows.length) - 1].at;
  const made = (number, step, vertex, cause, decision, scope, evidence, more = {}) => ({
    id: `incident-${number}`, at: at(step) + 3.1, vertex, incarnation: number, cause, scope, decision, evidence, user_code: false, region: [vertex],
    detected_after_s: 0.41, recovered_at: at(step) + 12.4, recovery_s: 9.3, outcome: "recovered", came_to: more.outcome ?? "recovered", ...more,
  });
  return [
    made(1, 41, "rollout-2", "process_died", "restart rollout-2", "vertex", { exit: "SIGKILL", detail: "killed by signal 9", tokens_kept: 18211, last_words: "[2026-11-25 18:03:11] INFO  decode batch: 31 running\n[2026-11-25 18:03:12] INFO  decode batch: 31 running" }),
    made(2, 118, "actor-1", "stalled", "restart the gang of actor", "region", { stack: "File \"actor.py\", line 212, in accumulate\n  all_reduce(...)\nFile \"distributed.py\", line 88, in wait", quiet_s: 61.2 }, { region: ["actor-0", "actor-1", "actor-2", "actor-3"], detected_after_s: 60.8, recovered_at: at(118) + 71, recovery_s: 68 }),
    made(3, 203, "rollout-0", "node_lost", "start rollout-0 on another machine", "vertex", { node: "node-2", seen_last_s: 12 }, { recovered_at: at(203) + 96, recovery_s: 93 }),
    made(4, 288, "rollout-2", "engine_start_failed", "start again after a pause", "vertex", { last_words: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB" }, { recovered_at: null, recovery_s: null, outcome: "open" }),
  ];
}

const phaseOf = { live: "running", good: "succeeded", bad: "failed", large: "running" };

function job(kind, name, seed, count, since, roles = ROLES, machines = 3) {
  const rows = steps(seed, count, since, kind === "bad");
  const last = rows.at(-1);
  const ended = kind === "good" || kind === "bad";
  const found = incidents(rows);
  if (ended) found[3] = { ...found[3], recovered_at: last.at - 20, recovery_s: 31, outcome: "recovered", came_to: "recovered" };
  return {
    kind, rows, incidents: found, seed, tags: kind === "good" ? ["baseline"] : [], notes: "",
    vertices: vertices(since, machines, roles).map((one) => (ended ? { ...one, phase: "stopped", reason: "finished", busy: "" } : one)),
    job: {
      job_id: `${name}-5f3a${seed}`, name, phase: phaseOf[kind], reason: kind === "bad" ? "user_code" : ended ? "finished" : "",
      message: kind === "bad" ? "reward.py:41: KeyError: 'answer'" : "", epoch: 2, step: count, version: count, submitted_at: since - 20, started_at: since,
      ended_at: ended ? last.at + 4 : null, paused: false, roles: Object.fromEntries(roles), checkpoint_step: count - (count % 25), steps_asked: 400, error: kind === "bad" ? "KeyError: 'answer'" : "",
    },
    evaluations: {
      held_out: Array.from({ length: Math.floor(count / 25) }, (_, at) => ({
        version: at * 25, set: "held_out", prompts: 200, count: 800, reward_mean: round(0.16 + 0.5 / (1 + Math.exp(-(at * 25 - 90) / 40))),
        reward_std: 0.4, accuracy: round(0.15 + 0.5 / (1 + Math.exp(-(at * 25 - 90) / 40))), threshold: 1, pass_at: { 1: round(0.15 + 0.04 * at), 4: round(0.3 + 0.045 * at) }, best_of: {}, by: {},
      })),
    },
  };
}

/** A job as a line of the list. */
export function runOf(one) {
  const { rows, job, evaluations } = one;
  const best = evaluations.held_out.reduce((top, row) => (top && top.accuracy >= row.accuracy ? top : row), null);
  return {
    ...job, live: job.ended_at === null, steps: 300, recipe: "grpo", model: "Qwen2.5-0.5B-Instruct", seed: one.seed, config: job.name, reward: rows.at(-1).reward_mean,
    rewards: rows.filter((_, at) => at % 8 === 0).map((row) => row.reward_mean), held_out: best ? [{ set: "held_out", unit: "accuracy", value: best.accuracy, version: best.version, right_by: "", last: evaluations.held_out.at(-1).accuracy, last_version: evaluations.held_out.at(-1).version }] : [],
    tokens_per_s: rows.at(-1).tokens_per_s, cost: null, tags: one.tags, notes: one.notes,
  };
}

const now = Date.now() / 1000;
const many = [["trainer", 1], ["actor", 1999], ["reward", 500], ["rollout_manager", 1], ["rollout", 7499]];

export const JOBS = [
  job("live", "grpo-math", 7, 300, now - 300 * 16.6),
  job("good", "grpo-gsm8k", 11, 280, now - 3 * 86400),
  job("bad", "ppo-code", 13, 160, now - 2 * 86400),
];

let large = null;
/** Ten thousand vertices: made when first asked for. */
export const largeJob = () => (large ??= job("large", "large", 17, 300, now - 300 * 16.6, many, 800));

export const jobOf = (name) => (name === "large" ? largeJob() : JOBS.find((one) => one.job.name === name || one.job.job_id === name));
