"""The built-in trainer, which walks a job's graph.

Read `loop` first: it drives the parts that `training_run` wires together. `job_graph` is the graph as they read it,
`groups` what they know of prompts and samples, `firings` how operators are started and their results taken in,
`evaluation` how policies are evaluated, and `learning` how the gangs train, checkpoint and publish.
"""
