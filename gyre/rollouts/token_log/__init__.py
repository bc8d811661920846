"""The token ledger's write path: which rows are written, when they are committed, and which are still needed."""
