"""The trainer's side of the rollout plane: the client, the sample ledger, and which groups are trained when."""
