"""Whether a class of one's own keeps the contract of its role: `gyre.workloads.protocols`, tried out.

    from gyre.testing.contracts import check_actor, check_reward

    def test_my_actor_keeps_its_contract(tmp_path):
        check_actor(MyActor, config=CONFIG, directory=tmp_path)

    def test_my_reward_keeps_its_contract():
        check_reward(MyReward, config=CONFIG)

A check makes the class as a vertex's host does and calls it as the trainer does: with arguments that were pickled,
arrays that are read-only, and calls that come twice, too early or after a restore. It raises ContractBroken at the
first promise that is not kept. One rank is checked, in this process: what ranks do together shows in
`gyre.testing.in_process`, or on Ray.
"""

from gyre.testing.contracts.actor import check_actor
from gyre.testing.contracts.broken import ContractBroken
from gyre.testing.contracts.critic import check_critic
from gyre.testing.contracts.engine import check_engine
from gyre.testing.contracts.judges import check_reference, check_reward
from gyre.testing.contracts.rollout import check_rollout

__all__ = [
    "ContractBroken",
    "check_actor",
    "check_critic",
    "check_engine",
    "check_reference",
    "check_reward",
    "check_rollout",
]
