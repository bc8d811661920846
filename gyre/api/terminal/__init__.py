"""What people see of jobs in a terminal: tables, the live view of a job in the foreground, and what Ctrl-C does."""
