"""A job in the foreground of a terminal: the live view, and what Ctrl-C does."""
