"""Logs: what the processes of a job print, with time and level, in files that stay small; and how these are read."""
