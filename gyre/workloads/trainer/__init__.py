"""The built-in trainer: the loop that walks a job's graph, and the state that the loop keeps."""
