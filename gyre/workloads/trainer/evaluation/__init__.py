"""The evaluations of policy versions on held-out prompts: their log, their scoring, and which are still due."""
