/**
 * Answers the routes of the REST interface from made-up jobs: for development and for the tests of the page.
 * `POST /mock {"away": true, "token": "T"}` makes it refuse connections, or ask for a token.
 */
import { decisionsAround, eventsOf, momentOf, viewOf } from "./events.mjs";
import { JOBS, jobOf, runOf } from "./jobs.mjs";
import { accountOf, enginesOf, graphOf, logsOf, nodesOf, nowOf, specOf } from "./plane.mjs";
import { heldOutOf, heldOutSetsOf, samplesOf, stepsOf, tokensOf } from "./samples.mjs";
import { seriesOf, timelineOf } from "./timeline.mjs";

const PREFIX = "/api/v1/";
const behaviour = { away: false, token: "", commands: [] };
const streams = new Set();

function send(response, status, body, headers = {}) {
  response.writeHead(status, { "Content-Type": status < 400 ? "application/json" : "application/problem+json", "Cache-Control": "no-store", ...headers });
  response.end(body === null ? "" : JSON.stringify(body));
}

const problem = (response, status, code, detail, hint = "") => send(response, status, { type: `urn:gyre:problem:${code}`, title: detail, status, detail, code, hint });

function read(found, rest, query) {
  const number = (name) => (query.has(name) ? Number(query.get(name)) : null);
  const [head, ...more] = rest;
  switch (head) {
    case undefined: return viewOf(found);
    case "now": return nowOf(found);
    case "account": return accountOf(found);
    case "graph": return graphOf(found);
    case "spec": return specOf(found);
    case "engines": return enginesOf(found);
    case "nodes": return nodesOf(found);
    case "vertices": return { vertices: viewOf(found).vertices };
    case "incidents": return { incidents: viewOf(found).incidents };
    case "logs": return query.get("cursor") ? { lines: [], cursor: "c1", more: false, searched_from: null, missing: [] } : logsOf(found, query);
    case "series": return seriesOf(found, query);
    case "timeline": return timelineOf(found, query);
    case "at": return momentOf(found, number("seq"), number("time"));
    case "decisions": return decisionsAround(found, number("around") ?? 0);
    case "events": {
      const after = number("after") ?? 0;
      const events = eventsOf(found).slice(after, after + (number("limit") ?? 1000));
      return { events, next: events.at(-1)?.seq ?? after, more: after + events.length < eventsOf(found).length };
    }
    case "metrics": {
      const since = number("since") ?? 0;
      const steps = found.rows.filter((row) => row.step > since).slice(0, number("limit") ?? 1000);
      return { steps, next: steps.at(-1)?.step ?? since, more: (steps.at(-1)?.step ?? Infinity) < found.rows.length, warnings: [], bottleneck: "", progress: {} };
    }
    case "samples":
      if (more[0] === "steps") return stepsOf(found);
      return more.length === 3 ? tokensOf(found, ...more.map(Number)) : samplesOf(found, query);
    case "held-out":
      return more.length === 0 ? heldOutSetsOf(found) : heldOutOf(found, more[0], query);
    default: return null;
  }
}

function stream(found, request, response, after) {
  response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
  response.write("retry: 1000\n\n");
  let last = Number(request.headers["last-event-id"] ?? after);
  const write = (event) => response.write(`id: ${event.seq}\nevent: ${event.kind}\ndata: ${JSON.stringify(event)}\n\n`);
  for (const event of eventsOf(found).slice(last)) write(event);
  const one = { response, write, found };
  streams.add(one);
  response.on("close", () => streams.delete(one));
  last = eventsOf(found).length;
}

function body(request, then) {
  let text = "";
  request.on("data", (part) => (text += part));
  request.on("end", () => then(text ? JSON.parse(text) : {}));
}

/** One more step of a job that runs. */
function advance(found) {
  const before = found.rows.at(-1);
  const row = { ...before, step: before.step + 1, version: before.version + 1, at: before.at + 14 };
  found.rows.push(row);
  found.job.step = found.job.version = row.step;
  const events = eventsOf(found);
  const event = { seq: events.length + 1, id: `e${events.length}`, cause: null, kind: "StepCompleted", at: row.at, actor: "trainer-0", body: { step: row.step, version: row.version } };
  events.push(event);
  for (const one of streams) if (one.found === found) one.write(event);
}

/** Returns whether the request was for the mock server. */
export function answer(request, response) {
  const url = new URL(request.url, "http://mock");
  if (url.pathname === "/mock") {
    body(request, (asked) => {
      Object.assign(behaviour, asked);
      if (asked.advance) advance(jobOf(asked.advance));
      if (asked.away) for (const one of streams) one.response.destroy();
      send(response, 200, behaviour);
    });
    return true;
  }
  if (!url.pathname.startsWith(PREFIX)) return false;
  if (behaviour.away) {
    request.socket.destroy();
    return true;
  }
  if (url.pathname === `${PREFIX}session`) {
    body(request, ({ token }) => (token === behaviour.token ? send(response, 204, null, { "Set-Cookie": "gyre_session=1; HttpOnly; SameSite=Strict; Path=/" }) : problem(response, 401, "unauthorized", "The token is wrong.", "It is what `gyre ui` printed.")));
    return true;
  }
  if (behaviour.token && !(request.headers.cookie ?? "").includes("gyre_session=1")) {
    problem(response, 401, "unauthorized", "This server requires a token.");
    return true;
  }
  const [kind, target = "", ...rest] = url.pathname.slice(PREFIX.length).split("/").map(decodeURIComponent);
  if (kind !== "jobs") problem(response, 404, "not_found", "There is no such thing here.");
  else if (!target) send(response, 200, { jobs: JOBS.map(runOf), groups: null, total: JOBS.length, shared_names: [], cost: "" });
  else {
    const [name, verb] = target.split(":");
    const found = jobOf(name);
    if (!found) problem(response, 404, "not_found", `There is no job '${name}' here.`, "did you mean 'grpo-math'?");
    else if (verb) {
      body(request, (asked) => {
        behaviour.commands.push({ verb, ...asked });
        if (verb === "label") {
          const tags = [...new Set([...found.tags, ...asked.add])].filter((tag) => !asked.remove.includes(tag)).sort();
          Object.assign(found, { tags, notes: asked.notes ?? found.notes });
          return send(response, 200, { tags, notes: found.notes });
        }
        if (verb === "pause") Object.assign(found.job, { paused: true, phase: "paused" });
        if (verb === "resume") Object.assign(found.job, { paused: false, phase: "running" });
        send(response, 202, { job_id: found.job.job_id, seq: 9 });
      });
    } else if (rest[0] === "events" && rest[1] === "stream") stream(found, request, response, Number(url.searchParams.get("after") ?? 0));
    else {
      const made = read(found, rest, url.searchParams);
      if (made === null) problem(response, 404, "not_found", "There is no such route.");
      else send(response, 200, made);
    }
  }
  return true;
}
