import { Dialog } from "../parts/Dialog";
import { GO_KEYS } from "./keys";

const KEYS: readonly (readonly [string, string])[] = [
  ["?", "this list"],
  ["/", "search, where a view has one"],
  ["↑ ↓ Home End", "in a list: choose; Enter opens"],
  ["← →", "timeline: pan; tokens: the next token; replay: an event back and on"],
  ["+ − 0", "timeline: zoom in, out, all"],
  ["p n", "replay: the decision before, after"],
  ["f", "timeline: the next incident"],
  ["j", "tokens: the next joint"],
  ["Esc", "close a dialog, or leave a field"],
];

export function KeysDialog({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <table>
        <tbody>
          {KEYS.map(([keys, what]) => (
            <tr key={keys}>
              <th scope="row"><kbd>{keys}</kbd></th>
              <td>{what}</td>
            </tr>
          ))}
          {Object.entries(GO_KEYS).map(([key, view]) => (
            <tr key={key}>
              <th scope="row"><kbd>g</kbd> <kbd>{key}</kbd></th>
              <td>{view}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <form method="dialog" className="row">
        <button type="submit" className="primary">Close</button>
      </form>
    </Dialog>
  );
}
