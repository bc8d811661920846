/** Tags and note of a job, whether it runs or has ended. */
import { useState, type FormEvent } from "react";
import { ApiError, jobPath, post } from "../../data/api";
import { Dialog } from "../../parts/Dialog";
import type { LabelsSchema, Run } from "../../rest";

export function LabelsDialog({ run, onClose, onSaved }: { run: Run; onClose: () => void; onSaved: () => void }) {
  const [tags, setTags] = useState(run.tags.join(", "));
  const [notes, setNotes] = useState(run.notes);
  const [error, setError] = useState("");
  const save = (event: FormEvent): void => {
    event.preventDefault();
    const wanted = tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    const body = {
      add: wanted.filter((tag) => !run.tags.includes(tag)),
      remove: run.tags.filter((tag) => !wanted.includes(tag)),
      notes: notes === run.notes ? null : notes,
    };
    post<LabelsSchema>(jobPath(run.job_id, ":label"), body).then(onSaved, (problem: unknown) => setError(problem instanceof ApiError ? `${problem.message} ${problem.hint}` : String(problem)));
  };
  return (
    <Dialog title={`Tags and note of ${run.name}`} onClose={onClose}>
      <form onSubmit={save}>
        <label>Tags, with commas between them <input value={tags} onChange={(event) => setTags(event.target.value)} autoFocus /></label>
        <label>Note <textarea rows={4} value={notes} onChange={(event) => setNotes(event.target.value)} /></label>
        {error && <p className="refused" role="alert">{error}</p>}
        <div className="row">
          <button type="submit" className="primary">Save</button>
          <button type="button" onClick={onClose}>Leave it</button>
        </div>
      </form>
    </Dialog>
  );
}
