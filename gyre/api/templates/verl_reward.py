"""The reward of the job in job.yaml, as verl's custom_reward_function has it. Put your own in its place.

Try it without a job: gyre reward reward.py:compute_score data/train
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 where the answer behind the last "####" is the row's `reward_model.ground_truth`."""
    answer = solution_str.rpartition("####")[2].strip().replace(",", "")
    return {"score": float(answer == ground_truth), "acc": answer == ground_truth}
