"""The agent's process beside one engine: it dials the manager, holds samples, and loads policy versions."""
