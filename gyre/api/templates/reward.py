"""The reward of the job in job.yaml: what an answer earns.

Try it without a job: gyre reward reward.py:score rows.jsonl
"""


def score(prompt, completion, meta):
    """1 for the right answer, 0.3 for one that begins right but does not end there.

    `completion` is what the model wrote. `meta` holds the other columns of the row in rows.jsonl, and how the answer
    ended: "stop", or "length" if it was cut off.
    """
    if completion == meta["answer"] and meta["finish_reason"] == "stop":
        return 1.0
    return 0.3 if completion.startswith(meta["answer"]) else 0.0
