"""PPO with a critic on two-digit addition: the job of `grpo_arithmetic.py` with another recipe.

    gyre plan examples/ppo_critic.py
    gyre run examples/ppo_critic.py

The critic is a decoder of the actor's shape with a value head. It begins with the actor's weights, and is trained
beside it: each step of the job is one of both, they are checkpointed together, and a job that loses either goes on
with the same bits. `config.loss` says how its values become advantages, `config.critic` how it is trained.
"""

from gyre.api import RLJobBuilder

job = (
    RLJobBuilder()
    .name("ppo-critic")
    .node_num(1)
    .device_per_node(8)
    .device_type("CPU")
    .recipe("ppo")
    .config(
        {
            "seed": 0,
            "task": {"digits": 2, "operators": "+"},
            "model": {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "mlp": 256, "max_positions": 32},
            "sampling": {"n": 4, "max_new_tokens": 4},
            "optim": {"lr": 0.001},
            "warm_start": {"max_steps": 250, "batch": 256, "lr": 0.003, "stop_at": 0.68, "slips": 0.62},
            "loss": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95, "kl_reward_coef": 0.005},
            "critic": {"optim": {"lr": 0.001}},
        }
    )
    .run(
        steps=60,
        prompts_per_step=256,
        groups_per_firing=64,
        groups_per_micro_batch=128,
        checkpoint_every=10,
        evaluate_every=10,
        held_out=512,
    )
    .failover(silence_timeout_s=6.0)
    .actor()
    .total(1)
    .critic()
    .total(1)
    .rollout()
    .total(2)
    .elastic(1, 4)
    .reference()
    .total(1)  # for kl_reward_coef: the policy that training began with
    .reward()
    .total(1)
    .build()
)

if __name__ == "__main__":
    handle = job.submit()
    print(handle.wait()["job"]["result"])
