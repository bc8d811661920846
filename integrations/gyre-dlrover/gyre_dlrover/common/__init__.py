"""DLRover's names of things, by the modules that a job imports them from."""
