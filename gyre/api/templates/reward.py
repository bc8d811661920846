"""The reward of the job in job.yaml: what an answer earns.

Try it without a job: gyre reward reward.py:score rows.jsonl
"""


def score(prompt, completion, meta):
    """1 for the right answer and nothing else, 0.3 if it at least begins with it.

    `meta` holds the other columns of the row in rows.jsonl; `completion` is what the model wrote.
    """
    if completion == meta["answer"]:
        return 1.0
    return 0.3 if completion.startswith(meta["answer"]) else 0.0
