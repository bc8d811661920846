"""What is seen of a job: its samples, its numbers over time, any moment of its journal, and who did what when.

Page, command line, REST and sinks read it here, whether the cluster lives or is long gone. Nothing here decides, and
nothing waits for it: a job whose observations cannot be written goes on as it is. This room must not know how any of it
is shown.
"""
