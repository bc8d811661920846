/** The machines of the cluster, and why nobody new goes to one. */
import { bytes, clock, plural, short } from "../../format";
import { Badge } from "../../parts/Badge";
import type { Machine } from "../../rest";

/** A cluster of more machines is searched. */
const SHOWN = 200;
const NAMED = 6;

export function Machines({ machines, found }: { machines: readonly Machine[]; found: (text: string) => boolean }) {
  const shown = machines.filter((one) => found(`${one.id} ${one.ip} ${one.draining} ${one.vertices.join(" ")}`));
  return (
    <section aria-labelledby="machines">
      <h2 id="machines">{plural(shown.length, "machine")}</h2>
      <div className="wide" tabIndex={0} role="region" aria-label="Machines">
        <table>
          <thead>
            <tr><th scope="col">Machine</th><th scope="col" className="number">CPUs</th><th scope="col" className="number">GPUs</th><th scope="col" className="number">Memory</th><th scope="col" className="number">Deaths</th><th scope="col">Takes new ones</th><th scope="col">Stands there</th></tr>
          </thead>
          <tbody>
            {shown.slice(0, SHOWN).map((one) => (
              <tr key={one.id}>
                <td>{one.ip || one.id.slice(0, 12)}</td>
                <td className="number">{short(one.cpu)}</td>
                <td className="number">{short(one.gpu)}</td>
                <td className="number">{bytes(one.memory_bytes)}</td>
                <td className="number">{one.deaths}</td>
                <td>{stateOf(one)}</td>
                <td className="muted">{one.vertices.slice(0, NAMED).join(", ")}{one.vertices.length > NAMED && ` and ${one.vertices.length - NAMED} more`}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {shown.length > SHOWN && <p className="empty">{plural(shown.length - SHOWN, "more machine")}: search for them.</p>}
    </section>
  );
}

function stateOf(machine: Machine) {
  if (!machine.there) return <Badge tone="bad">gone</Badge>;
  if (machine.draining) return <Badge tone="attention">drains: {machine.draining}</Badge>;
  if (machine.left_until !== null) return <Badge tone="attention">left alone until {clock(machine.left_until)}</Badge>;
  if (machine.found) return <Badge tone="attention">{machine.found}</Badge>;
  return <Badge tone="good">yes</Badge>;
}
