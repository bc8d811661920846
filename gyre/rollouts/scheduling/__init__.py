"""What the rollout plane decides: where a sample runs, how many instances there are, how long a window is. Pure."""
