"""The gangs that learn: their lifecycle, what they are fed, optimizer steps, checkpoints, recovery, publishing."""
