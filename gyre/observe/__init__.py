"""What is kept of a job for people to look at, beside what the job itself needs to go on.

Nothing here decides, and nothing waits for it: a job whose observations cannot be written goes on as it is.
"""
