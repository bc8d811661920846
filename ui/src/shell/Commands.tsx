/** Commands to a job that runs. Each asks first, says what it will do, and is in the journal with who asked. */
import { useState, type FormEvent } from "react";
import { ApiError, jobPath, post } from "../data/api";
import { Dialog } from "../parts/Dialog";
import type { Accepted, JobView } from "../rest";

type Verb = "pause" | "resume" | "stop" | "drain" | "scale";

const ASKS: Readonly<Record<Verb, { title: string; what: string; act: string }>> = {
  pause: { title: "Pause the job?", what: "The trainer pauses at the end of its step. Nothing is lost.", act: "Pause" },
  resume: { title: "Resume the job?", what: "The trainer goes on with its next step.", act: "Resume" },
  stop: { title: "Stop the job?", what: "It ends at the end of its step, and can be continued with gyre resume.", act: "Stop" },
  drain: { title: "Drain a machine or a vertex", what: "Who stands there hands over first, and starts elsewhere.", act: "Drain" },
  scale: { title: "Scale a role", what: "Instances are started, or hand over and leave.", act: "Scale" },
};

export function Commands({ view }: { view: JobView }) {
  const [verb, setVerb] = useState<Verb | null>(null);
  if (view.job.ended_at !== null) return null;
  const verbs: Verb[] = [view.job.paused ? "resume" : "pause", "scale", "drain", "stop"];
  return (
    <>
      {verbs.map((one) => (
        <button key={one} type="button" onClick={() => setVerb(one)}>{ASKS[one].act} …</button>
      ))}
      {verb && <Confirm verb={verb} view={view} onClose={() => setVerb(null)} />}
    </>
  );
}

function Confirm({ verb, view, onClose }: { verb: Verb; view: JobView; onClose: () => void }) {
  const roles = Object.keys(view.job.roles ?? {});
  const [role, setRole] = useState(roles.includes("rollout") ? "rollout" : (roles[0] ?? ""));
  const [count, setCount] = useState(String(view.job.roles?.[role] ?? 1));
  const [target, setTarget] = useState("");
  const [reason, setReason] = useState("");
  const [said, setSaid] = useState<{ refused: boolean; text: string } | null>(null);
  const [sending, setSending] = useState(false);
  const asked = ASKS[verb];
  const body = verb === "scale" ? { role, count: Number(count) } : verb === "drain" ? { target, reason } : verb === "stop" ? { reason } : {};
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    setSending(true);
    post<Accepted>(`${jobPath(view.job.name)}:${verb}`, body)
      .then((accepted) => setSaid({ refused: false, text: `Accepted: event ${accepted.seq} of the journal.` }))
      .catch((error: unknown) => setSaid({ refused: true, text: error instanceof ApiError ? `${error.message} ${error.hint}` : String(error) }))
      .finally(() => setSending(false));
  };
  return (
    <Dialog title={asked.title} onClose={onClose}>
      <form onSubmit={submit}>
        <p>{asked.what}</p>
        {verb === "scale" && (
          <>
            <label>Role <select value={role} onChange={(event) => setRole(event.target.value)}>{roles.map((one) => <option key={one}>{one}</option>)}</select></label>
            <label>Instances <input type="number" min={0} max={100000} required value={count} onChange={(event) => setCount(event.target.value)} /></label>
          </>
        )}
        {verb === "drain" && (
          <>
            <label>Vertex or machine <input required list="targets" value={target} onChange={(event) => setTarget(event.target.value)} /></label>
            <datalist id="targets">{view.vertices.slice(0, 500).map((one) => <option key={one.id} value={one.id} />)}</datalist>
          </>
        )}
        {(verb === "drain" || verb === "stop") && <label>Reason <input value={reason} maxLength={1000} onChange={(event) => setReason(event.target.value)} /></label>}
        {said && <p className={said.refused ? "refused" : "badge good"} role={said.refused ? "alert" : "status"}>{said.text}</p>}
        <div className="row">
          <button type="button" onClick={onClose}>{said && !said.refused ? "Close" : "Cancel"}</button>
          {!(said && !said.refused) && <button type="submit" className="primary" disabled={sending}>{asked.act}</button>}
        </div>
      </form>
    </Dialog>
  );
}
