import type { ApiError } from "../data/api";

/** What the server refused, and what to do about it. */
export function Refused({ error }: { error: ApiError }) {
  return (
    <div className="refused" role="alert">
      <p>{error.message}</p>
      {error.hint && <p className="muted">{error.hint}</p>}
    </div>
  );
}
