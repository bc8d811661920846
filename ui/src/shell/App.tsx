/** The whole page: which job and view the address names, and around them what every view has. */
import { useState } from "react";
import { useConnection } from "../data/connection";
import { hrefOf, useRoute } from "../route";
import { clock } from "../format";
import { JobShell } from "./JobShell";
import { KeysDialog } from "./KeysDialog";
import { useKeys } from "./keys";
import { ThemeSwitch } from "./ThemeSwitch";
import { TokenForm } from "./TokenForm";
import { JobsView } from "../views/jobs/JobsView";

export function App() {
  const route = useRoute();
  const connection = useConnection();
  const [keysShown, showKeys] = useState(false);
  useKeys(route, () => showKeys(true));
  const away = connection.awaySince !== null && (
    <p className="away" role="status">
      Nobody has answered since {clock(connection.awaySince)}. What is shown is of then; the page goes on asking.
    </p>
  );
  return (
    <>
      <a className="skip" href="#content" onClick={skip}>Skip to the content</a>
      {connection.needsToken ? (
        <TokenForm />
      ) : route.job ? (
        <JobShell key={route.job} route={route} away={away} onKeys={() => showKeys(true)} />
      ) : (
        <>
          <header className="top">
            <a className="home" href={hrefOf("", "jobs")}>Gyre</a>
            <div className="right">
              <button type="button" className="plain" onClick={() => showKeys(true)}>Keys</button>
              <ThemeSwitch />
            </div>
          </header>
          {away}
          <div className="frame bare">
            <main id="content" tabIndex={-1}>
              <JobsView />
            </main>
          </div>
        </>
      )}
      {keysShown && <KeysDialog onClose={() => showKeys(false)} />}
    </>
  );
}

/** Not by the address: that says which view is shown. */
function skip(event: React.MouseEvent): void {
  event.preventDefault();
  document.getElementById("content")?.focus();
}
