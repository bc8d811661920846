"""The rollout plane: prompts, groups and samples, and the ledger that accounts for every one of them."""

from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups, unpack_groups

__all__ = ["Group", "Sample", "VersionRun", "pack_groups", "unpack_groups"]
