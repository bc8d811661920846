/**
 * The REST interface's requests and answers. `python -m tools.rest_types` writes this file; its source is
 * gyre/api/rest/schemas.py, and sample_schemas.py beside it.
 *
 * Times are seconds since 1970. An answer may have more keys than are listed here.
 */

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };

/** `seq` is the event that records the request in the journal. */
export interface Accepted {
  job_id: string;
  seq: number;
}

export interface Account {
  prompts: PromptAccountSchema;
  tokens: TokenAccountSchema;
  money: Price[];
  cost: CostLine[];
}

/** `needs_token`: whether this server asks for one at all. `lasts_s`: for how long the cookie is good. */
export interface BrowserSessionSchema {
  needs_token: boolean;
  lasts_s: number;
}

/**
 * Tokens `start` to `end` of a row, the latter exclusive: what the policy has `drawn` in a turn, or what was put there
 * before it. What was drawn is `trained` unless an earlier row of the rollout has it. `waited_s`: for how long the
 * answer before had been there, null where there was none or that is not known.
 */
export interface ConversationPart {
  turn: number;
  drawn: boolean;
  trained: boolean;
  start: number;
  end: number;
  versions: number[];
  instances: string[];
  waited_s: number | null;
  text: string | null;
}

/** What a job costs, in words: so far, by the hour, by a million tokens. */
export interface CostLine {
  label: string;
  value: string;
}

/**
 * `digest` is the SHA-256 of the token, in hex: whoever asks makes the token, and nobody else sees it. `expires_at` is
 * in seconds since 1970.
 */
export interface CreateTokenBody {
  name: string;
  digest: string;
  expires_at?: number | null;
  scopes?: ("join" | "generate" | "publish")[];
}

/** The decisions before and after an event, by their numbers: what made or settled an incident, and commands. */
export interface Decisions {
  previous: number | null;
  next: number | null;
}

export interface DoorOfKey {
  answered: number;
  failed: number;
  tokens: number;
}

/**
 * What came of requests since the fleet's manager started. Of the recent ones half were answered within `median_s` and
 * 95 % within `slow_s`, null before the first.
 */
export interface DoorRequests {
  answered: number;
  failed: number;
  tokens: number;
  median_s: number | null;
  slow_s: number | null;
  keys: Record<string, DoorOfKey>;
}

/** The door of a fleet. `open` requests are not answered yet, and `kept` ones can be asked for again. */
export interface DoorSchema {
  url: string;
  open: number;
  kept: number;
  waiting: number;
  requests: DoorRequests;
}

export interface DrainBody {
  target: string;
  reason?: string;
}

export type EdgeKind = "samples" | "weights" | "collective" | "control";

/** How many there may be of a role. */
export interface ElasticSchema {
  min: number;
  max: number;
}

export interface EngineList {
  engines: EngineSchema[];
  pools: Record<string, PoolSchema>;
  door: DoorSchema | null;
  sessions: SessionsSchema | null;
}

/**
 * One instance of the rollout plane, as the rollout manager last said. `not_admitted`: why it is given no samples;
 * `limits_why`: where `max_running` and `kv_tokens` come from; `loads`: how weights last came into the engine
 * (`loader`, `disk`, or `start` of the engine), and `loads_why` why not by the loader; `transfer_why`: why by this
 * transport and codec.
 */
export interface EngineSchema {
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
  /** Generated since it came; null where that is not known, as below. */
  tokens: number | null;
  /** Since it was last heard of. */
  silent_s: number | null;
}

/** What the prompts with one value of a column earned. */
export interface EvaluationPart {
  count: number;
  reward_mean: number | null;
  accuracy: number | null;
}

/** What a policy version's answers to a held-out set earned. */
export interface EvaluationSchema {
  version: number;
  set: string;
  /** prompts of the set */
  prompts: number;
  /** samples of all prompts */
  count: number;
  /** mean reward of the samples */
  reward_mean: number | null;
  /** standard deviation of the rewards over all samples */
  reward_std: number | null;
  /**
   * Null where nothing says what is right: neither a reward (`config.evaluation.threshold`) nor the reward function, by
   * the number that `right_by` names.
   */
  accuracy: number | null;
  threshold: number | null;
  /** by k, the chance that one of k samples is right */
  pass_at: Record<string, number>;
  /** by k, the expected largest reward of k samples */
  best_of: Record<string, number>;
  /** The number beside the reward that says which samples are right, as `reward.acc`; "" where the threshold does. */
  right_by: string;
  /** How many different answers there are, by their tokens; 0 where that is not known. */
  distinct: number;
  /** The mean of each number that the reward function returned beside the reward, as `reward.NAME`. */
  components: Record<string, number>;
  by: Record<string, EvaluationPart>;
}

/** `next` is the `after` of the following page; `more`: whether this one is full. */
export interface EventPage {
  events: EventSchema[];
  next: number;
  more: boolean;
}

/** One event of the journal; `seq` is the id of its server-sent form. */
export interface EventSchema {
  seq: number;
  id: string;
  cause: string | null;
  kind: string;
  at: number;
  actor: string;
  body: Record<string, Json>;
}

/** `view` is the name of the page's view that has more of it. */
export interface Fact {
  label: string;
  value: string;
  view: string;
}

/** `seq` is the event that made it. */
export interface FlagSchema {
  at: number;
  kind: "incident" | "publish" | "evaluation" | "checkpoint" | "command";
  text: string;
  seq: number;
}

/**
 * A disk without room. `where` is a folder on it, `node` its machine ("": the master's). `said`: a write that failed is
 * all that is known of it.
 */
export interface FullDisk {
  where: string;
  node: string;
  required_bytes: number;
  available_bytes: number;
  since: number;
  said: boolean;
}

/**
 * The compiled graph; besides these keys its machines, cycles, regions and notes, and unless it is left out where each
 * vertex stands (`sub_graphs`, `placement`).
 */
export interface Graph {
  name: string;
  recipe: string | null;
  roles: Role[];
  operators: OperatorSchema[];
  edges: GraphEdge[];
  role_edges: GraphEdge[];
}

/**
 * What flows from one operator, or role, to another: of `source` firings every `produce`, for `target` `consume`,
 * `delay` of them ahead; with a `capacity`, so many at most.
 */
export interface GraphEdge {
  source: string;
  target: string;
  produce: number;
  consume: number;
  delay: number;
  capacity: number | null;
  kind: EdgeKind;
}

export interface Health {
  ok: boolean;
}

/**
 * The best evaluation of a held-out set, and the policy version that earned it; `last` is the newest one, of
 * `last_version`. `unit`: `accuracy`, or `reward` where there is no accuracy. `right_by` and `components` as in an
 * evaluation.
 */
export interface HeldOut {
  set: string;
  unit: "accuracy" | "reward";
  value: number;
  version: number;
  right_by: string;
  components: Record<string, number>;
  last: number | null;
  last_version: number | null;
}

/**
 * Of `total` prompts `changed` have another verdict than the version `against` got, `better` of them a better one; of
 * `unmatched` ones it had no answer.
 */
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

/**
 * A prompt with its answers, those `before` by the version that they are compared with: null where that had no such
 * prompt. `difference`: by how much a larger share is right, or, where nothing is right or wrong, by how much more was
 * earned.
 */
export interface HeldOutPair {
  prompt_number: number;
  prompt: string | null;
  right_answer: string | null;
  changed: boolean;
  difference: number;
  now: HeldOutSide;
  before: HeldOutSide | null;
}

export interface HeldOutSet {
  set: string;
  versions: number[];
}

/** The held-out sets of which answers are kept, and of which versions, oldest first. */
export interface HeldOutSets {
  sets: HeldOutSet[];
}

/**
 * What one version answered to a prompt: `right` of the `count` samples are right, null where that has no meaning;
 * `reward` is their mean.
 */
export interface HeldOutSide {
  count: number;
  right: number | null;
  reward: number | null;
  samples: SampleItem[];
}

/** `counts[i]` samples earned from `edges[i]` to `edges[i + 1]`. */
export interface Histogram {
  edges: number[];
  counts: number[];
}

export interface IncidentList {
  incidents: IncidentSchema[];
}

/** One thing that went wrong: evidence, culprit, decision, outcome. */
export interface IncidentSchema {
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
  outcome: string;
  recovery_s: number | null;
  /** The outcome in words: a call that is made again, and the job's own code that raised, have not recovered. */
  came_to: string;
}

/** The job's record as the journal keeps it. `/now` has what it costs so far. */
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
  ended_at: number | null;
  started_at: number | null;
  paused: boolean;
  roles: Record<string, number>;
  checkpoint_step: number;
  checkpoint_path: string;
  result: Record<string, Json>;
  /** The traceback or sentence that ended the job, for people. */
  error: string;
  /** Whose weights it began with, if not its model's. */
  weights_from: string;
  /**
   * What an hour costs since `priced_at`, of what its roles reserve; 0 where no price is given, and once it has ended.
   */
  price_per_hour: number;
  priced_at: number;
  /** What the job cost until `priced_at`. */
  spent: number;
  /** The steps that it is to make; null where its trainer says what a step is. */
  steps_asked: number | null;
}

/**
 * `total`: how many jobs there are, of which a list has the newest. `shared_names`: those of several jobs, whether the
 * filter lets them through or not, which are distinguished by their ids. `cost`: what the jobs that are listed cost
 * together, in words; "" where none has prices.
 */
export interface JobList {
  jobs: Run[];
  groups: RunGroup[] | null;
  total: number;
  shared_names: string[];
  cost: string;
}

/** All there is to see of a job at one moment. */
export interface JobView {
  job: Job;
  master: Master;
  vertices: VertexSchema[];
  incidents: IncidentSchema[];
  progress: Record<string, Json>;
  /** By the held-out set's name, in the order of versions. */
  evaluations: Record<string, EvaluationSchema[]>;
  training: Training;
  warnings: LearningWarningSchema[];
  /** What the job's speed depends on, in one sentence; empty where that is not known. */
  bottleneck: string;
  seq: number;
  /** The disks without room, for which the job waits. */
  disks: FullDisk[];
  store: StoreHealth;
}

export interface JoinTokenList {
  tokens: JoinTokenSchema[];
}

/** A token with which machines join the rollout plane; the token itself is nowhere. Times in seconds since 1970. */
export interface JoinTokenSchema {
  name: string;
  by: string;
  created_at: number;
  expires_at: number | null;
  revoked_at: number | null;
  /** What its owner may do, of `gyre.config.TOKEN_SCOPES`. */
  scopes: string[];
}

/** Tags to add and to remove, and the note; null leaves it as it is. */
export interface LabelBody {
  add?: string[];
  remove?: string[];
  notes?: string | null;
}

export interface LabelsSchema {
  tags: string[];
  notes: string;
}

/**
 * `kind` is `vertex` or `instance`. `spans` are from, to (seconds since 1970), state and cause: whom it waited for, or
 * why it was down.
 */
export interface LaneSchema {
  id: string;
  role: string;
  kind: "vertex" | "instance";
  spans: Span[];
}

/** What says that the job does not learn as it should, since `step`; it holds now. `code` is stable. */
export interface LearningWarningSchema {
  code: string;
  step: number;
  message: string;
}

/**
 * `words` is the verdict as a sentence's beginning, `because` what it is drawn from; `beside` are the warnings that
 * hold, with their steps.
 */
export interface Learns {
  verdict: "yes" | "partly" | "no" | "worse" | "stuck" | "saturated" | "too early" | "unknown";
  words: string;
  tone: Tone;
  because: string;
  beside: string[];
}

/**
 * `at` is by the clock of the machine that wrote the line, in seconds since 1970; of a line without a time it is that
 * of the line before. `level` is D, I, W or E.
 */
export interface LogLine {
  at: number;
  level: string;
  vertex: string;
  incarnation: number;
  file: string;
  text: string;
}

/**
 * `lines` in the order of time; `cursor` is where the next page begins, and `more` whether it can be read at once. What
 * is older than `searched_from` was not looked at; null: there is nothing older. `missing` says, in a first page, whose
 * logs are not to be had, and why.
 */
export interface LogPage {
  lines: LogLine[];
  cursor: string;
  more: boolean;
  searched_from: number | null;
  missing: string[];
}

/**
 * A machine of the cluster, by Ray's id. `cpu`, `gpu` and `memory_bytes` are what the job may use of it; `there` is
 * false for one that has gone and of which something is remembered. `deaths` are those that count; until `left_until`,
 * and while it is `draining`, nobody new is placed there. `found` is what its pre-flight found wrong.
 */
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

export interface Master {
  pid: number;
  epoch: number;
  url: string;
  node: string;
  answering: boolean;
}

/**
 * `steps` are the metrics of each step, by the names in docs/training.md; `next` is the `since` of the following page,
 * and `more` whether this one is full. `progress` is what the trainer last reported.
 */
export interface Metrics {
  steps: Step[];
  next: number;
  more: boolean;
  warnings: LearningWarningSchema[];
  bottleneck: string;
  job_id: string;
  seq: number;
  step: number;
  version: number;
  progress: Record<string, Json>;
}

/** The job after `event`, which is null before the first one. `first` and `last` are the journal's. */
export interface MomentSchema {
  view: JobView;
  event: EventSchema | null;
  first: number;
  last: number;
}

/** What the job does now, in a sentence, and whether that is as it should be. */
export interface Now {
  sentence: string;
  tone: Tone;
  learns: Learns;
  slow: Slow;
  facts: Fact[];
}

export interface OperatorSchema {
  ref: string;
  role: string;
  method: string;
  dispatch: string;
}

export type Point = [number, number | null];

/**
 * A role of instances that has its own price. `price_per_hour` is for one instance, in the user's currency.
 * `rate_tokens_s` is the rate of one instance, measured on those that generate; it gives `price_per_million_tokens`.
 * The last two are null while none generates.
 */
export interface PoolSchema {
  instances: number;
  price_per_hour: number;
  rate_tokens_s: number | null;
  price_per_million_tokens: number | null;
}

export interface Price {
  role: string;
  instances: number;
  price_per_hour: number;
  price_per_million_tokens: number | null;
}

/** RFC 9457. `code` is stable across releases. */
export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  code: string;
  hint: string;
  details: Record<string, Json>;
}

/** Groups. `drawn` = `trained` + `dropped` + `in_flight` + `lost`. */
export interface PromptAccountSchema {
  drawn: number;
  trained: number;
  dropped: number;
  in_flight: number;
  lost: number;
  twice: number;
}

export interface RevokeTokenBody {
  name: string;
}

export interface Role {
  name: string;
  entrypoint: string;
  total: number;
  gang: boolean;
  elastic: ElasticSchema | null;
}

/** A line of the table of runs. Null is what is not known. */
export interface Run {
  job_id: string;
  name: string;
  phase: string;
  reason: string;
  message: string;
  epoch: number;
  step: number;
  version: number;
  submitted_at: number;
  ended_at: number | null;
  started_at: number | null;
  /** When its last run began, in seconds since 1970: when it was submitted, or went on after an end. */
  ran_since: number | null;
  /** Those asked for; null where the user's own trainer says. */
  steps: number | null;
  /** "" for a user's own trainer. */
  recipe: string;
  /** The last part of its folder, or the small decoder's shape, or "". */
  model: string;
  seed: number | null;
  /** Equal for jobs that differ in their seed alone. */
  config: string;
  /** Of the last step. */
  reward: number | null;
  /** Of at most `POINTS` steps, evenly spread. */
  rewards: (number | null)[];
  /** The best of each set, in the order of their names. */
  held_out: HeldOut[];
  /** The median of those steps without the first one of a run, which has the engines' start in it. */
  tokens_per_s: number | null;
  /** What the run cost until its end, or so far, in the currency of its prices; null where it has none. */
  cost: number | null;
  live: boolean;
  tags: string[];
  notes: string;
}

/**
 * What runs have in common (`key`, "" for those that have none of it), what they are called (`title`), the `settings`
 * in which they differ from the other groups, how many of them failed, and what they come to by the name of the column:
 * as numbers, and in `words`. `held_out`: of which set, and in which unit, that value is.
 */
export interface RunGroup {
  key: string;
  title: string;
  settings: string;
  jobs: string[];
  names: string[];
  failed: number;
  values: Record<string, Spread>;
  words: Record<string, string>;
  held_out: [string, string] | null;
}

/**
 * One sample in a list. `prompt`, `answer` and `right_answer`, which is the data's, are cut at 2,000 characters.
 * `rollout` is the rollout that it is a row of, null where it is one by itself. `versions` and `instances` are `[which,
 * start, end]`: tokens `start` to `end`, the latter exclusive.
 */
export interface SampleItem {
  step: number;
  group: number;
  sample: number;
  rollout: number | null;
  reward: number | null;
  more: Record<string, number | null>;
  outcome: string;
  finish_reason: string;
  prompt: string | null;
  answer: string | null;
  right_answer: string | null;
  prompt_tokens: number;
  tokens: number;
  versions: [number, number, number][];
  instances: [string, number, number][];
  quarantined: boolean;
  session: SampleSession | null;
}

/** `total` samples match; `histogram` is of all of them. */
export interface SamplePage {
  samples: SampleItem[];
  total: number;
  histogram: Histogram;
}

/**
 * The session that a sample is a row of: how it ended and why, its `turns` and those of them that are in this row, and
 * the seconds in which its agent was waited for and its turns were generated. `turns` and the seconds stand with its
 * first row alone, the latter where one rollout manager saw all of it. `sentence` says it all.
 */
export interface SampleSession {
  outcome: string;
  reason: string;
  turns: number | null;
  turns_here: number;
  tool_s: number | null;
  engine_s: number | null;
  sentence: string;
}

export interface SampleStep {
  step: number;
  samples: number;
  groups: number;
  bytes: number;
}

/** The steps whose samples are kept, oldest first, and how many groups are quarantined. */
export interface SampleSteps {
  steps: SampleStep[];
  quarantined: number;
}

/**
 * One sample with all that is kept of it: its texts are whole. What has a value for each token is null where the job
 * has none. `mask` is true of each token that was drawn, null where all were. `conversation` is of a row of a session
 * its turns, in order.
 */
export interface SampleTokens {
  step: number;
  group: number;
  sample: number;
  rollout: number | null;
  reward: number | null;
  more: Record<string, number | null>;
  outcome: string;
  finish_reason: string;
  prompt: string | null;
  answer: string | null;
  right_answer: string | null;
  prompt_tokens: number;
  tokens: number;
  versions: [number, number, number][];
  instances: [string, number, number][];
  quarantined: boolean;
  session: SampleSession | null;
  prompt_ids: number[];
  prompt_pieces: string[] | null;
  token_ids: number[];
  pieces: string[] | null;
  logprobs: (number | null)[] | null;
  trainer_logprobs: (number | null)[] | null;
  ref_logprobs: (number | null)[] | null;
  values: (number | null)[] | null;
  advantage: number | null;
  mask: boolean[] | null;
  conversation: ConversationPart[];
  meta: Record<string, Json>;
  extras: Record<string, Json>;
}

/** `count` vertices of `role`. */
export interface ScaleBody {
  role: string;
  count: number;
}

/**
 * Numbers over time: by source and name, pairs of a time (seconds since 1970) and a value, which is of the
 * `resolution_s` seconds from there on. `cut`: there are more sources than an answer holds; ask for fewer.
 */
export interface SeriesSchema {
  resolution_s: number;
  series: Record<string, Record<string, Point[]>>;
  cut: boolean;
}

export interface SessionBody {
  token: string;
}

/**
 * What came of sessions since the rollout manager started: how many ended how, turns that were answered, attempts that
 * were begun in the place of others, and the newest faults, the newest first.
 */
export interface SessionCountsSchema {
  outcomes: Record<string, number>;
  turns: number;
  drawn_again: number;
  faults: SessionFaultSchema[];
}

/** An attempt at a rollout that infrastructure ended: which, and what was said. */
export interface SessionFaultSchema {
  session: string;
  reason: string;
}

/**
 * The sessions of a job with agents. Of those that are `running` some are `at_engine`, the others `with_agent`; those
 * that `ended` are of groups that are not stored yet, and `turns` of all that are there. `branches`: turns that began
 * anew, by why, since the manager started. `pause_s` is above 0 while one is handed out at a time. `sentence` says all
 * of it.
 */
export interface SessionsSchema {
  waiting: number;
  running: number;
  at_engine: number;
  with_agent: number;
  ended: number;
  turns: number;
  workers: number;
  failed_groups: number;
  pause_s: number;
  branches: Record<string, number>;
  since_start: SessionCountsSchema;
  sentence: string;
}

/**
 * The role that the job's speed depends on, and in which way; both empty where that is not known. `words` are a
 * sentence, also then.
 */
export interface Slow {
  what: string;
  because: string;
  words: string;
}

export type Span = [number, number, SpanState, string];

export type SpanState = "train" | "generate" | "wait" | "load" | "reward" | "checkpoint" | "evaluate" | "start" | "down" | "idle";

/** Of so many members that have the value: their mean, standard deviation (None of one alone) and sum. */
export interface Spread {
  count: number;
  mean: number;
  std: number | null;
  sum: number;
}

export type Step = Record<string, number | null>;

/** `at_once` does not wait for the step of the trainer. */
export interface StopBody {
  reason?: string;
  at_once?: boolean;
}

export interface StoreHealth {
  /** Why the journal cannot be written, or an empty string. */
  error: string;
}

/** `first` and `last` are the job's own ends. `cut`: there are more lanes than an answer holds. */
export interface TimelineSchema {
  since: number;
  until: number;
  first: number;
  last: number;
  lanes: LaneSchema[];
  flags: FlagSchema[];
  cut: boolean;
}

/**
 * `generated` = `delivered` + `in_flight` + `discarded` + `missing`, all of one moment; null where no rollout manager
 * has counted. `told` says what the count is of, `waiting` how what is in flight is called. `not_trained` are those
 * that the trainer left out after their delivery, by reason.
 */
export interface TokenAccountSchema {
  generated: number | null;
  delivered: number | null;
  in_flight: number | null;
  waiting: string;
  told: string;
  discarded: Record<string, number>;
  missing: number | null;
  not_trained: Record<string, number>;
}

export type Tone = "good" | "attention" | "bad" | "over";

/**
 * What the steps of the job say together: the metrics of its first and last step, and the tokens of all. Where an ended
 * job went on: when (seconds since 1970), at which step, and the reward of the first step since.
 */
export interface Training {
  first: Record<string, Json>;
  last: Record<string, Json>;
  tokens: number;
  continued_at: number | null;
  continued_step: number;
  /** The reward of the first step since. */
  continued_reward: number | null;
}

/** A vertex, or a machine by its address or the beginning of its id. */
export interface UndrainBody {
  target: string;
}

export interface VertexList {
  vertices: VertexSchema[];
}

/**
 * One instance of a role. `version`: of the weights that it serves; `busy`: the operator that it runs; `fields`: its
 * own report.
 */
export interface VertexSchema {
  id: string;
  role: string;
  rank: number;
  phase: string;
  reason: string;
  message: string;
  incarnation: number;
  pid: number;
  node: string;
  since: number;
  restarts: number;
  /** While it waits for room: what it requires, what is available, and what would help. */
  no_room: string;
  no_room_since: number;
  /** While it reports nothing and is left alone: what its process was found to do, a `Life` value. */
  silent: string;
  silent_since: number;
  /** How often this vertex, in whatever incarnation, fell silent and was heard again. */
  false_alarms: number;
  version: number | null;
  busy: string;
  fields: Record<string, Json>;
}
