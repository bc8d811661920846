"""What the rollout plane decides: where a sample runs, how long the trainer generates, what is trained when.

Every module here is a decision and nothing else: it reads no clock and no random source (`now` is an argument),
and knows no socket, no ledger and no engine. The manager drives them; so may the simulator.
"""
