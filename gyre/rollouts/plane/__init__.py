"""The rollout plane as a machine: events in, instructions out. Pure."""
