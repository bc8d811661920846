/** Over how many steps the curves are a mean; in the address, so that a link shows the same. */
import { setParams, useRoute } from "../../route";

const CHOICES = [1, 5, 20, 100];

export function useSmoothing(): number {
  return Math.max(1, Number(useRoute().params["smooth"]) || 1);
}

export function SmoothChoice() {
  const over = useSmoothing();
  return (
    <label>
      Smooth
      <select value={over} onChange={(event) => setParams({ smooth: event.target.value === "1" ? null : event.target.value })}>
        {[...new Set([...CHOICES, over])].map((one) => <option key={one} value={one}>{one === 1 ? "not at all" : `over ${one} steps`}</option>)}
      </select>
    </label>
  );
}
