"""Where a job's numbers go besides its store: TensorBoard, Weights & Biases, MLflow, a file, or a class of one's own.

| module | what it has |
| --- | --- |
| `sink` | what a sink is told, and what of the job it knows |
| `kinds` | the built-in ones |
| `following` | what is new in the store, from where this sink was |
| `process` | a sink's process |
"""
