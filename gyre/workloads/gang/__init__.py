"""Ranks that work together: calls to all of them, alignment, and what the ranks keep: memory and served weights."""
