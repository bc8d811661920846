"""GRPO on two-digit addition: the job of `gyre demo`, as a job file.

    gyre plan examples/grpo_arithmetic.py
    gyre run examples/grpo_arithmetic.py
    python examples/grpo_arithmetic.py

Every role takes the class that the recipe has for it: a decoder of about 200,000 parameters in plain torch, and
exact match as the reward. `config` is what these classes read; `run` is what the built-in trainer reads.
"""

from gyre.api import RLJobBuilder

job = (
    RLJobBuilder()
    .name("grpo-arithmetic")
    .node_num(1)
    .device_per_node(8)
    .device_type("CPU")  # here a device is only a number: nothing is reserved
    .recipe("grpo")
    .config(
        {
            "seed": 0,
            "task": {"digits": 2, "operators": "+"},
            "model": {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "mlp": 256, "max_positions": 32},
            "sampling": {
                "n": 8,
                "temperature": 1.0,
                "max_new_tokens": 4,
            },  # the longest sum has three digits, and an end
            "optim": {"lr": 1e-3},
            # Supervised steps first, on the answers of a pupil who forgets to carry in 62 % of the problems.
            "warm_start": {"max_steps": 250, "batch": 256, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
        }
    )
    .run(
        steps=80,
        prompts_per_step=128,  # groups in an optimizer step; the next two must divide it
        groups_per_firing=32,  # groups in one call of rollout or reward
        groups_per_micro_batch=64,  # groups in one forward and backward pass of the actor gang
        checkpoint_every=10,
        evaluate_every=10,
        held_out=512,
    )
    .failover(silence_timeout_s=6.0)
    .actor()
    .total(2)  # a gang: two ranks, joined by Gloo
    .rollout()
    .total(2)
    .elastic(1, 4)  # `gyre scale rollout=4` may take it this far
    .reward()
    .total(1)
    .build()
)

if __name__ == "__main__":
    handle = job.submit()  # on RAY_ADDRESS, or on a Ray of this process's own
    print(handle.wait()["job"]["result"])
