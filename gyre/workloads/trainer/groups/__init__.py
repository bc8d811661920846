"""The groups of a run: what the ledger knows of them, how they become micro-batches, and which are replaced."""
