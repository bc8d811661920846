"""The gangs that learn: their lifecycle and calls, optimizer steps, checkpoints, recovery and publishing."""
