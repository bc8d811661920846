/** The size of one rem in pixels: larger on large screens, or as the reader has set it. */
import { useEffect, useState } from "react";

const read = (): number => Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 16;

export function useRootSize(): number {
  const [size, setSize] = useState(read);
  useEffect(() => {
    const changed = (): void => setSize(read());
    window.addEventListener("resize", changed);
    return () => window.removeEventListener("resize", changed);
  }, []);
  return size;
}
