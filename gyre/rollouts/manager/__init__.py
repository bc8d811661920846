"""The rollout manager's process: connections, policy versions, delivery, windows, status."""
