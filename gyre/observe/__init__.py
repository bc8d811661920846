"""What is seen of a job, from its store alone: its numbers over time, any moment of its journal, and who did what when.

Page, command line, REST and sinks read it here, whether the cluster lives or is long gone. This room must not know how
any of it is shown.
"""
