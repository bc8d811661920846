"""vLLM as an engine: its record, and how it is started. It runs in a process, and an environment, of its own."""
