"""Checkpoints of Megatron's ranks: on the disk, in the machine's memory, and turned into a folder others can read."""
