"""Gyre: an elastic control plane for the RL post-training of large language models."""

__version__ = "0.1.0"
