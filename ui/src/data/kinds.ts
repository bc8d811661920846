/** The kinds of events in a journal: the browser's EventSource wants them by name. A test compares them with Gyre's. */
export const EVENT_KINDS = [
  "JobSubmitted", "JobContinued", "MasterStarted", "VertexStarted", "VertexStartFailed", "VertexWaitsForRoom",
  "VertexFoundRoom", "DiskFilled", "DiskHasRoom", "VertexLost", "VertexFellSilent", "VertexHeardAgain", "VertexStopped", "OperatorFailed", "TrainerFinished",
  "TrainerFailed", "StepCompleted", "StepReported", "LearningWarned", "WeightsPublished", "Evaluated",
  "EvaluationLeftOut", "CheckpointCommitted", "CheckpointDamaged", "StepDiverged", "GangRestored", "GroupReplaced",
  "GroupRedrawn", "BatchSkipped", "PassesHalved", "MasterHung", "JobStalled", "RolloutsChanged", "ScaleAdvised",
  "Reported", "ReportRefused", "ScaleRequested", "DrainRequested", "MachineExamined", "JoinTokenCreated",
  "UndrainRequested", "JoinTokenRevoked", "PauseRequested", "ResumeRequested", "StopRequested", "ClusterLost",
  "StoreReturned", "TimerFired",
] as const;
