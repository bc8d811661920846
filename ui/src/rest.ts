/**
 * The REST interface's answers, as the page uses them. The server's side is gyre/api/rest/schemas.py.
 *
 * Times are seconds since 1970. An answer may have more keys than are listed here.
 */

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };

/** RFC 9457: what an answer with an error says. */
export interface Problem {
  title: string;
  status: number;
  detail: string;
  code: string;
  hint?: string;
}

export interface Job {
  job_id: string;
  name: string;
  phase: string;
  reason: string;
  message: string;
  epoch: number;
  step: number;
  version: number;
  submitted_at: number;
  started_at?: number | null;
  ended_at: number | null;
  paused?: boolean;
  roles?: Record<string, number>;
  checkpoint_step?: number;
  steps_asked?: number | null;
  error?: string;
}

/** The best evaluation of a held-out set, and the policy version that earned it. */
export interface HeldOut {
  set: string;
  unit: "accuracy" | "reward";
  value: number;
  version: number;
  right_by: string;
}

/** A line of the table of runs. What is not known is null. */
export interface Run extends Job {
  live: boolean;
  /** When its last run began: when it was submitted, or went on. */
  ran_since?: number | null;
  /** The steps asked for. */
  steps: number | null;
  recipe: string;
  model: string;
  seed: number | null;
  reward: number | null;
  rewards: (number | null)[];
  held_out: HeldOut[];
  tokens_per_s: number | null;
  cost: number | null;
  tags: string[];
  notes: string;
}

export interface Spread {
  count: number;
  mean: number;
  std: number | null;
}

export interface RunGroup {
  key: string;
  jobs: string[];
  names: string[];
  values: Record<string, Spread>;
  held_out: [string, string] | null;
}

export interface JobList {
  jobs: Run[];
  groups: RunGroup[] | null;
  total: number;
}

export interface Labels {
  tags: string[];
  notes: string;
}

export interface Master {
  pid: number;
  epoch: number;
  url: string;
  node: string;
  answering: boolean;
}

export interface Vertex {
  id: string;
  role: string;
  rank: number;
  pid: number;
  node: string;
  phase: string;
  reason: string;
  message: string;
  incarnation: number;
  restarts: number;
  since: number;
  no_room: string;
  /** What its process does while it reports nothing: "busy" or "hung". */
  silent: string;
  silent_since: number;
  false_alarms: number;
  version: number | null;
  busy: string;
  fields: Record<string, Json>;
}

export interface Incident {
  id: string;
  at: number;
  vertex: string;
  incarnation: number;
  cause: string;
  scope: string;
  decision: string;
  evidence: Record<string, Json>;
  user_code: boolean;
  region: string[];
  detected_after_s: number | null;
  recovered_at: number | null;
  recovery_s: number | null;
  /** The outcome in words. */
  came_to: string;
  outcome: string;
}

export interface Evaluation {
  version: number;
  set: string;
  prompts: number;
  count: number;
  reward_mean: number | null;
  reward_std: number | null;
  accuracy: number | null;
  /** The number of the reward function that says what is right, as "reward.acc"; empty where a threshold does. */
  right_by: string;
  pass_at: Record<string, number>;
  /** What the reward function returned beside the reward, as "reward.NAME": each a mean. */
  components: Record<string, number>;
}

export interface LearningWarning {
  code: string;
  step: number;
  message: string;
}

export interface JobView {
  job: Job;
  master: Master;
  vertices: Vertex[];
  incidents: Incident[];
  progress: Record<string, Json>;
  evaluations: Record<string, Evaluation[]>;
  warnings: LearningWarning[];
  bottleneck: string;
  seq: number;
  store: { error: string };
}

export type Tone = "good" | "attention" | "bad" | "over";

export interface Now {
  sentence: string;
  tone: Tone;
  learns: { verdict: string; words: string; tone: Tone; because: string; beside: string[] };
  slow: { what: string; because: string; words: string };
  facts: { label: string; value: string; view: string }[];
}

export interface PromptAccount {
  drawn: number;
  trained: number;
  dropped: number;
  in_flight: number;
  lost: number;
  twice: number;
}

/** Null: not known, for the rollout manager never counted. */
export interface TokenAccount {
  generated: number | null;
  delivered: number | null;
  in_flight: number | null;
  /** How the tokens in flight are called, and what the count is of. */
  waiting: string;
  told: string;
  discarded: Record<string, number>;
  missing: number | null;
  /** Delivered, and not trained on, by reason. */
  not_trained?: Record<string, number>;
}

export interface Price {
  role: string;
  instances: number;
  price_per_hour: number;
  price_per_million_tokens: number | null;
}

export interface Account {
  prompts: PromptAccount;
  tokens: TokenAccount;
  money: Price[];
}

/** The numbers of one step, by the names in docs/training.md. */
export type Step = Record<string, number | null>;

export interface Metrics {
  steps: Step[];
  next: number;
  more: boolean;
  warnings: LearningWarning[];
  bottleneck: string;
}

/** By source (`vertex/<id>`, `instance/<name>`, `trainer`, `plane`, `master`) and number: when, and how much. */
export interface Series {
  resolution_s: number;
  series: Record<string, Record<string, [number, number | null][]>>;
}

export type SpanState =
  | "train"
  | "generate"
  | "wait"
  | "load"
  | "reward"
  | "checkpoint"
  | "evaluate"
  | "start"
  | "down"
  | "idle";

/** From, to, state, and for whom or why. */
export type Span = [number, number, SpanState, string];

export interface Lane {
  id: string;
  role: string;
  kind: "vertex" | "instance";
  spans: Span[];
}

export interface Flag {
  at: number;
  kind: "incident" | "publish" | "evaluation" | "checkpoint" | "command";
  text: string;
  seq: number;
}

export interface Timeline {
  since: number;
  until: number;
  first: number;
  last: number;
  lanes: Lane[];
  flags: Flag[];
  /** There are more lanes than an answer holds. */
  cut?: boolean;
}

export interface Event {
  seq: number;
  id: string;
  cause: string | null;
  kind: string;
  at: number;
  actor: string;
  body: Record<string, Json>;
}

/** The journal folded to one moment. */
export interface Moment {
  view: JobView;
  event: Event | null;
  first: number;
  last: number;
}

export interface Decisions {
  previous: number | null;
  next: number | null;
}

/** A version or an instance, from token `start` up to `end`. */
export type Stretch<T> = [T, number, number];

export interface SampleItem {
  step: number;
  group: number;
  sample: number;
  reward: number | null;
  more: Record<string, Json>;
  outcome: string;
  finish_reason: string;
  /** The texts are null where the job has no tokenizer. */
  prompt: string | null;
  answer: string | null;
  /** What the data has; null where it has none. */
  right_answer: string | null;
  prompt_tokens: number;
  tokens: number;
  versions: Stretch<number>[];
  instances: Stretch<string>[];
  quarantined: boolean;
}

export interface SamplePage {
  samples: SampleItem[];
  total: number;
  histogram: { edges: number[]; counts: number[] };
}

export interface SampleSteps {
  steps: { step: number; samples: number; groups: number; bytes: number }[];
  quarantined: number;
}

export interface HeldOutSets {
  sets: { set: string; versions: number[] }[];
}

/** What one version answered to a prompt; `right` is null where nothing is right or wrong. */
export interface HeldOutSide {
  count: number;
  right: number | null;
  reward: number | null;
  samples: SampleItem[];
}

export interface HeldOutPair {
  prompt_number: number;
  prompt: string | null;
  right_answer: string | null;
  changed: boolean;
  difference: number;
  now: HeldOutSide;
  before: HeldOutSide | null;
}

export interface HeldOutPage {
  set: string;
  version: number;
  against: number | null;
  total: number;
  changed: number;
  better: number;
  unmatched: number;
  prompts: HeldOutPair[];
}

export interface SampleTokens extends SampleItem {
  prompt_ids: number[];
  prompt_pieces: string[] | null;
  token_ids: number[];
  pieces: string[] | null;
  logprobs: (number | null)[] | null;
  trainer_logprobs: (number | null)[] | null;
  ref_logprobs: (number | null)[] | null;
  advantage: number | (number | null)[] | null;
  /** False where the loss does not look. */
  mask: (number | boolean)[] | null;
  meta: Record<string, Json>;
}

export interface Engine {
  instance: string;
  engine: string;
  node: string;
  state: string;
  version: number;
  not_admitted: string;
  samples: number;
  running: number;
  rate_tokens_s: number;
  max_running: number;
  kv_used_tokens: number;
  kv_tokens: number;
  limits_why: string;
  loads: string;
  loads_why: string;
  transport: string;
  codec: string;
  transfer_why: string;
  silent_s?: number;
  tokens?: number;
}

export interface Pool {
  instances: number;
  price_per_hour: number;
  rate_tokens_s: number | null;
  price_per_million_tokens: number | null;
}

export interface DoorOfKey {
  answered: number;
  failed: number;
  tokens: number;
}

export interface Door {
  url: string;
  open: number;
  kept: number;
  waiting: number;
  requests: DoorOfKey & { median_s: number | null; slow_s: number | null; keys: Record<string, DoorOfKey> };
}

export interface EngineList {
  engines: Engine[];
  pools: Record<string, Pool>;
  door: Door | null;
}

export interface Machine {
  id: string;
  ip: string;
  there: boolean;
  cpu: number;
  gpu: number;
  memory_bytes: number;
  vertices: string[];
  deaths: number;
  left_until: number | null;
  found: string;
  draining: string;
}

export interface MachineList {
  nodes: Machine[];
}

export type EdgeKind = "samples" | "weights" | "collective" | "control";

export interface GraphEdge {
  source: string;
  target: string;
  kind: EdgeKind;
  produce: number;
  consume: number;
  delay: number;
  capacity: number | null;
}

export interface Operator {
  ref: string;
  role: string;
  method: string;
  dispatch: string;
}

export interface Role {
  name: string;
  entrypoint: string;
  total: number;
  gang: boolean;
  elastic: { min: number; max: number } | null;
}

export interface Graph {
  name: string;
  recipe: string;
  roles: Role[];
  operators: Operator[];
  edges: GraphEdge[];
  role_edges: GraphEdge[];
}

export interface EventPage {
  events: Event[];
  next: number;
  more: boolean;
}

export interface LogLine {
  at: number;
  /** D, I, W or E. */
  level: string;
  vertex: string;
  incarnation: number;
  file: string;
  text: string;
}

export interface LogPage {
  lines: LogLine[];
  cursor: string;
  more: boolean;
  searched_from: number | null;
  missing: string[];
}

export interface Accepted {
  job_id: string;
  seq: number;
}
