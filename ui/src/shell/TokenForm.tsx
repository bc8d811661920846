/** Asks for the token of a server that requires one. The token goes into a cookie that scripts cannot read. */
import { useState, type FormEvent } from "react";
import { ApiError, post } from "../data/api";
import { tokenGiven } from "../data/connection";

export function TokenForm() {
  const [token, setToken] = useState("");
  const [refusal, setRefusal] = useState("");
  const [sending, setSending] = useState(false);
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    setSending(true);
    post("session", { token })
      .then(tokenGiven)
      .catch((error: unknown) => setRefusal(error instanceof ApiError ? `${error.message} ${error.hint}` : String(error)))
      .finally(() => setSending(false));
  };
  return (
    <main id="content" tabIndex={-1}>
      <form className="card stack" onSubmit={submit} aria-labelledby="token-title">
        <h1 id="token-title">This server requires a token</h1>
        <p className="muted">It is in the file or the variable that the server was started with, or in the address that <code>gyre ui</code> printed.</p>
        <label htmlFor="token">Token</label>
        <input id="token" type="password" autoComplete="current-password" autoFocus required value={token} onChange={(event) => setToken(event.target.value)} />
        {refusal && <p className="refused" role="alert">{refusal}</p>}
        <div className="row">
          <button type="submit" className="primary" disabled={sending}>Open</button>
        </div>
      </form>
    </main>
  );
}
