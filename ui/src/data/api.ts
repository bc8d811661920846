/**
 * Asks the server. Addresses are relative to the page, so that it works below any path. Every failure is an `ApiError`,
 * which says whether the server answered at all; what comes of that is known to `connection.ts`.
 */
import { answered, askForToken, failed } from "./connection";
import type { Problem } from "../rest";

/** A server that has not answered by then is away: the slowest answer is a fold of a long journal. */
const TIMEOUT_MS = 20_000;

/** A gateway's words for a server that is not there. */
const GATEWAY = new Set([502, 503, 504]);

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly hint = "",
  ) {
    super(message);
  }

  /** Nobody answered: what is shown may still be right, and another try may succeed. */
  get away(): boolean {
    return this.status === 0 || GATEWAY.has(this.status);
  }
}

export function urlOf(path: string): string {
  return new URL(`api/v1/${path}`, document.baseURI).href;
}

export function jobPath(job: string, rest = ""): string {
  return `jobs/${encodeURIComponent(job)}${rest}`;
}

async function ask<T>(path: string, init: RequestInit): Promise<T> {
  let response: Response;
  try {
    response = await fetch(urlOf(path), { ...init, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    failed();
    throw new ApiError("The server does not answer.", 0, "It may be starting again. The page goes on asking.");
  }
  if (GATEWAY.has(response.status)) failed();
  else answered();
  if (response.ok) return (response.status === 204 ? null : await response.json()) as T;
  if (response.status === 401) askForToken();
  throw await errorOf(response);
}

async function errorOf(response: Response): Promise<ApiError> {
  try {
    const problem = (await response.json()) as Problem;
    return new ApiError(problem.detail || problem.title, response.status, problem.hint);
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, response.status);
  }
}

export function get<T>(path: string): Promise<T> {
  return ask<T>(path, { headers: { Accept: "application/json" } });
}

export function post<T>(path: string, body: object): Promise<T> {
  return ask<T>(path, {
    method: "POST",
    headers: { Accept: "application/json", "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}
