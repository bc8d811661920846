"""SGLang as an engine: its record, and how it is started. It runs in a process, often an environment, of its own."""
