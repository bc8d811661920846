/** The numbers of every step of a job: asked for page by page, and from then on only what is new. */
import { useEffect, useState } from "react";
import { get, jobPath } from "./api";
import { useConnection } from "./connection";
import type { Metrics, Step } from "../rest";

const PAGE = 10_000;

class StepLog {
  steps: readonly Step[] = [];
  complete = false;
  private next = 0;
  private running: Promise<void> | null = null;

  constructor(private readonly job: string) {}

  /** Brings what is new. Whoever asks meanwhile waits for the same request. */
  more(): Promise<void> {
    this.running ??= this.read().finally(() => {
      this.running = null;
    });
    return this.running;
  }

  private async read(): Promise<void> {
    for (;;) {
      const page = await get<Metrics>(jobPath(this.job, `/metrics?since=${this.next}&limit=${PAGE}`));
      if (page.steps.length > 0) this.steps = [...this.steps, ...page.steps];
      this.next = page.next;
      if (!page.more) break;
    }
    this.complete = true;
  }
}

const logs = new Map<string, StepLog>();

export interface Steps {
  readonly steps: readonly Step[];
  readonly complete: boolean;
}

/** An empty name asks for nothing. */
export function useSteps(job: string, tick: number): Steps {
  const { generation } = useConnection();
  const [, setShown] = useState(0);
  const log = logs.get(job) ?? new StepLog(job);
  logs.set(job, log);
  useEffect(() => {
    if (!job) return;
    let there = true;
    // What failed is shown by the connection; the next tick asks again.
    log.more().then(() => there && setShown((old) => old + 1), () => undefined);
    return () => {
      there = false;
    };
  }, [log, tick, generation]);
  return { steps: log.steps, complete: log.complete };
}
