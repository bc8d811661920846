"""verl's own trainer over a Gyre fleet, in an environment of its own (`make test-verl`), on CPUs: its processes are
killed while samples are in flight, one joins, and verl resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.data.small import write_tokenizer
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import Fleet, fleet_on
from tests.engines.embedded.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
RUN_S = 600.0
GROUPS, SAMPLES, TOKENS = 8, 4, 200

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.verl,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-verl makes verl's environment"),
]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return sum(letter in "aeiou" for letter in solution_str) / max(len(solution_str), 1)
"""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer, prompts, and a reward."""
    root = tmp_path_factory.mktemp("verl")
    model = write_checkpoint(write_tokenizer(root / "model"), MODEL)
    told = json.loads((model / "tokenizer_config.json").read_text())
    told |= {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"How many are {number}?"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "prompts.parquet")
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.fixture(scope="module")
def fleet(shared: Shared, place: Path) -> Iterator[Fleet]:
    with fleet_on(shared, place / "model", "for-verl", place) as fleet:
        yield fleet


def verl(fleet: Fleet, place: Path, steps: int) -> subprocess.Popen[str]:
    """verl's trainer up to this step, from its last checkpoint where it has one."""
    temp = place / "ray"
    temp.mkdir(exist_ok=True)
    own = [
        f"fleet.url={fleet.url}",
        f"fleet.key={fleet.key}",
        f"fleet.folder={place / 'policies'}",
        f"actor_rollout_ref.model.path={place / 'model'}",
        f"data.train_files={place / 'prompts.parquet'}",
        f"data.val_files={place / 'prompts.parquet'}",
        f"data.train_batch_size={GROUPS}",
        "data.max_prompt_length=64",
        f"data.max_response_length={TOKENS}",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        "critic.enable=False",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.actor.use_kl_loss=False",
        f"reward.custom_reward_function.path={place / 'reward.py'}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={place / 'checkpoints'}",
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=24",
        f"+ray_kwargs.ray_init._temp_dir={fleet.shared.home}/v",
    ]
    script = (
        "import sys\n"
        "from gyre_verl.main import main\n"
        "from gyre_verl.testing.cpu import OVERRIDES\n"
        "main([*OVERRIDES, *sys.argv[1:]])\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))}
    return subprocess.Popen(
        [str(PYTHON), "-c", script, *own],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=kept | {"PYTHONUNBUFFERED": "1", **cpu_environment()},
        cwd=place,
        start_new_session=True,
    )


def cpu_environment() -> dict[str, str]:
    """What `gyre_verl.testing.cpu` wants of each process; it cannot be imported before."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "gyre_verl.testing.cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Followed:
    """verl's output, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError("".join(self.lines[-60:]))

    def ends(self) -> None:
        assert self._process.stdout is not None
        self.lines += self._process.stdout
        assert self._process.wait(60.0) == 0, "".join(self.lines[-60:])

    def steps(self) -> dict[int, dict[str, float]]:
        """The numbers of each step that it has printed."""
        found = {}
        for line in self.lines:
            if match := re.search(r"step:(\d+) - (.*)", line):
                pairs = (part.partition(":") for part in match[2].split(" - "))
                found[int(match[1])] = {
                    key: float(number[1])
                    for key, _, value in pairs
                    if (number := re.search(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\)?\s*$", value))
                }
        return found


async def test_verl_trains_while_the_fleet_is_killed_and_goes_on_where_it_was(
    fleet: Fleet, place: Path, shared: Shared
) -> None:
    faults = ProcessFaults(fleet.handle)
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
    process = verl(fleet, place, 6)
    joined = None
    try:
        followed = Followed(process)
        followed.until(r"step:1 ")
        (victim,) = faults.kill("rollout-0")
        followed.until(r"step:2 ")
        assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        joined = join(fleet, shared)
        followed.until(r"step:3 ")
        (victim,) = faults.kill("rollout_manager-0")
        followed.until(r"step:4 ")
        assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        followed.ends()
    finally:
        stop(process)
        if joined is not None:
            stop(joined)
    steps = followed.steps()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[1]["training/rollout_probs_diff_max"] < 1e-5, "its log-probs are of other weights"
    for numbers in steps.values():
        assert numbers["training/off_policy/trajectory_staleness/max"] <= 2
    again = verl(fleet, place, 8)
    try:
        later = Followed(again)
        later.ends()
    finally:
        stop(again)
    assert sorted(later.steps()) == [7, 8]
    with open_store(fleet.handle.store_url) as store:
        account = account_of(store.ledger(fleet.handle.job_id))
    assert (account.lost, account.trained_twice) == ((), ())


def join(fleet: Fleet, shared: Shared) -> subprocess.Popen[str]:
    """An instance from elsewhere."""
    made = shared.gyre("token", "create", "for-verl", "--name", f"spot-{time.monotonic_ns()}")
    assert made.code == 0, made.err
    command = [sys.executable, "-m", "gyre.api", "join", fleet.url, "--token", made.out.strip()]
    return subprocess.Popen(
        [*command, "--engine", "embedded"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GYRE_HOME": str(shared.home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
