/** The journal of a made-up job, and its fold to a moment. */
const FIRST = ["JobSubmitted", "MasterStarted"];

export function eventsOf(found) {
  if (found.events) return found.events;
  const out = [];
  const add = (kind, at, body, actor = "master") => out.push({ id: `e${out.length}`, cause: null, kind, at, actor, body });
  add("JobSubmitted", found.job.submitted_at, { job_id: found.job.job_id, name: found.job.name, roles: found.job.roles }, "user");
  add("MasterStarted", found.job.submitted_at + 1, { epoch: 2, pid: 311, node: "node-1", url: "http://127.0.0.1:8265" });
  for (const one of found.vertices) add("VertexStarted", one.since, { vertex: one.id, incarnation: 1, pid: one.pid, node: one.node }, one.id);
  for (const row of found.rows) {
    add("StepCompleted", row.at, { incarnation: 1, step: row.step, version: row.version, metrics: { reward_mean: row.reward_mean } }, "trainer-0");
    add("WeightsPublished", row.at + 0.4, { incarnation: 1, version: row.version, step: row.step, checksum: "9f2c", size_bytes: 988_000_000 }, "trainer-0");
    if (row.step % 25 === 0) {
      add("CheckpointCommitted", row.at + 2, { incarnation: 1, step: row.step, path: `checkpoints/step-${row.step}` }, "trainer-0");
      add("Evaluated", row.at + 9, { incarnation: 1, version: row.step, accuracy: 0.4, count: 800, prompts: 200 }, "trainer-0");
    }
  }
  for (const one of found.incidents) {
    add("VertexLost", one.at, { vertex: one.vertex, incarnation: one.incarnation, cause: one.cause, evidence: one.evidence, detected_after_s: one.detected_after_s });
    if (one.recovered_at) add("VertexStarted", one.recovered_at, { vertex: one.vertex, incarnation: one.incarnation + 1, pid: 5000, node: "node-3" }, one.vertex);
  }
  out.sort((a, b) => a.at - b.at || FIRST.indexOf(b.kind) - FIRST.indexOf(a.kind));
  found.events = out.map((one, at) => ({ seq: at + 1, ...one }));
  return found.events;
}

const isDecision = (event) => ["VertexLost", "OperatorFailed", "ScaleRequested", "PauseRequested"].includes(event.kind);

export function decisionsAround(found, seq) {
  const numbers = eventsOf(found).filter(isDecision).map((event) => event.seq);
  return { previous: numbers.filter((one) => one < seq).at(-1) ?? null, next: numbers.find((one) => one > seq) ?? null };
}

/** The view as it is now, or as it was when `until` events had happened. */
export function viewOf(found, until = Infinity) {
  const events = eventsOf(found);
  const upTo = Math.min(until, events.length);
  const at = events[upTo - 1].at;
  const past = until < events.length;
  const rows = found.rows.filter((row) => row.at <= at);
  const incidents = found.incidents.filter((one) => one.at <= at).map((one) => (one.recovered_at && one.recovered_at > at ? { ...one, recovered_at: null, recovery_s: null, outcome: "open", came_to: "open" } : one));
  const down = new Map(incidents.filter((one) => !one.recovered_at).flatMap((one) => one.region.map((vertex) => [vertex, one])));
  const step = past ? rows.length : found.job.step;
  const job = past ? { ...found.job, phase: down.size ? "recovering" : rows.length ? "running" : "starting", reason: "", step, version: step, ended_at: null } : found.job;
  return {
    job,
    master: { pid: 311, epoch: 2, url: "", node: "node-1", answering: found.job.ended_at === null },
    vertices: found.vertices.map((one) => {
      const lost = down.get(one.id);
      if (lost) return { ...one, phase: "starting", reason: "restarted", message: lost.decision, busy: "" };
      if (past && one.since > at) return { ...one, phase: "starting", reason: "submitted", busy: "" };
      return past ? { ...one, phase: "running", reason: "" } : one;
    }),
    incidents,
    progress: { step, steps: 400, version: step, reward: rows.at(-1)?.reward_mean ?? null, tokens_per_s: rows.at(-1)?.tokens_per_s ?? 0, groups_waiting: 9, times: { actor: { training: 0.58, "waits for rollout (generating)": 0.36, publishing: 0.06 } } },
    evaluations: Object.fromEntries(Object.entries(found.evaluations).map(([set, list]) => [set, list.filter((one) => one.version <= step)])),
    training: { first: found.rows[0], last: rows.at(-1) ?? {}, tokens: 31_000_000 },
    warnings: found.kind === "bad" ? [{ code: "reward_flat", step: 120, message: "the reward has not risen for 80 steps" }] : [],
    bottleneck: found.job.ended_at ? "" : "rollout; the actor waits 36 % of its time for samples",
    seq: upTo, disks: [], store: { error: "" },
  };
}

export function momentOf(found, seq, time) {
  const events = eventsOf(found);
  const wanted = seq ?? events.findLastIndex((event) => event.at <= time) + 1;
  const at = Math.max(1, Math.min(events.length, wanted));
  return { view: viewOf(found, at), event: events[at - 1], first: 1, last: events.length };
}
