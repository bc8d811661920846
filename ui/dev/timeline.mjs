/** Who did what when, of a made-up job; and the series of its numbers. */
import { randomOf } from "./random.mjs";

/** As the real server's. */
const MOST_LANES = 500;
const COST = { actor: "train", rollout: "generate", reward: "reward" };

function lane(found, vertex, since, until) {
  const spans = [];
  const random = randomOf(found.seed + vertex.rank * 31 + vertex.role.length);
  const add = (from, to, state, cause = "") => to > since && from < until && spans.push([from, to, state, cause]);
  add(found.job.started_at, vertex.since, "start", "setup()");
  let from = vertex.since;
  for (const row of found.rows) {
    if (row.at < since - 60 || from > until) {
      from = row.at;
      continue;
    }
    const wide = row.at - from;
    const busy = { trainer: 0.1, actor: 0.55 + 0.1 * random(), rollout: 0.8 + 0.12 * random(), reward: 0.2, rollout_manager: 0 }[vertex.role] ?? 0;
    const state = COST[vertex.role];
    if (vertex.role === "actor") {
      add(from, from + wide * (1 - busy) * 0.9, "wait", "waits for rollout (generating)");
      add(from + wide * (1 - busy) * 0.9, row.at - 0.4, "train");
      if (row.step % 25 === 0) add(row.at - 0.4, row.at + 2, "checkpoint", `step ${row.step}`);
    } else if (vertex.role === "rollout") {
      add(from, from + 0.6, "load", `version ${row.version - 1}`);
      add(from + 0.6, from + wide * busy, row.step % 25 === 1 ? "evaluate" : "generate");
      add(from + wide * busy, row.at, "idle", "no samples to generate: staleness bound");
    } else if (state) {
      add(from, from + wide * (1 - busy), "wait", "waits for rollout (generating)");
      add(from + wide * (1 - busy), row.at, state);
    } else add(from, row.at, vertex.role === "trainer" ? "wait" : "idle", vertex.role === "trainer" ? "waits for rollout (generating)" : "");
    from = row.at;
  }
  const cut = found.incidents.filter((one) => one.region.includes(vertex.id));
  return { id: vertex.id, role: vertex.role, kind: vertex.role === "rollout" ? "instance" : "vertex", spans: cut.reduce(carve, spans) };
}

function carve(spans, incident) {
  const from = incident.at - (incident.detected_after_s ?? 0);
  const to = incident.recovered_at ?? incident.at + 30;
  const kept = spans.flatMap(([a, b, state, cause]) => {
    const out = [];
    if (a < from) out.push([a, Math.min(b, from), state, cause]);
    if (b > to) out.push([Math.max(a, to), b, state, cause]);
    return out;
  });
  return [...kept, [from, to, "down", incident.cause]].sort((a, b) => a[0] - b[0]);
}

export function timelineOf(found, query) {
  const first = found.job.started_at;
  const last = found.rows.at(-1).at + 2;
  const until = Number(query.get("until") ?? last);
  const since = Number(query.get("since") ?? Math.max(first, until - 600));
  const flags = [];
  const add = (at, kind, text, seq = 1) => at >= since && at <= until && flags.push({ at, kind, text, seq });
  for (const row of found.rows) {
    add(row.at + 0.4, "publish", `version ${row.version} published`);
    if (row.step % 25 === 0) add(row.at + 2, "checkpoint", `checkpoint of step ${row.step}`);
    if (row.step % 25 === 0) add(row.at + 9, "evaluation", `version ${row.step} evaluated: 0.41`);
  }
  for (const one of found.incidents) add(one.at, "incident", `${one.vertex}: ${one.cause}; ${one.decision}`, 40);
  const lanes = found.vertices.slice(0, MOST_LANES).map((one) => lane(found, one, since, until));
  return { since, until, first, last, lanes, flags: flags.sort((a, b) => a.at - b.at), cut: found.vertices.length > lanes.length };
}

export function seriesOf(found, query) {
  const prefix = query.get("source") ?? "";
  const rows = found.rows;
  const series = {};
  const sources = [...found.vertices.slice(0, 400).map((one) => [`${one.role === "rollout" ? "instance" : "vertex"}/${one.id}`, one]), ["plane", null], ["trainer", null], ["master", null]];
  for (const [name, vertex] of sources) {
    if (!name.startsWith(prefix)) continue;
    const random = randomOf(found.seed + name.length * 7 + (vertex?.rank ?? 0));
    const points = (base, spread) => rows.map((row) => [row.at, Number((base + spread * (random() - 0.5)).toFixed(3))]);
    series[name] = vertex?.role === "rollout" ? { rate_tokens_s: points(1900, 600), running: points(30, 6), kv_used_ratio: points(0.7, 0.2) } : name === "plane" ? { open_groups: points(40, 12), queued: points(60, 60) } : { memory_bytes: points(3.1e9, 2e8) };
  }
  return { resolution_s: 5, series };
}
