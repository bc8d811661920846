"""verl's trainer on CPUs, in an environment of its own: a small model, prompts and a reward, over a fleet or over
servers of verl's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.small import write_tokenizer
from tests.engines.embedded.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
GROUPS, SAMPLES, TOKENS = 8, 4, 200

CPU_ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "gyre_verl.testing.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What `gyre_verl.testing.cpu` wants of each process; it cannot be imported before."""

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


def make_place(root: Path) -> Path:
    """A model, its tokenizer, prompts, and a reward."""
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


def overrides(
    place: Path, temp: str, steps: int, *, gpus: int = 2, checkpoints: str = "checkpoints"
) -> list[str]:
    """verl's, whoever generates. `temp` is the folder of a Ray of its own, which feigns as many GPUs."""
    return [
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
        "actor_rollout_ref.rollout.dtype=float32",  # the embedded engine's: their log-probs are compared
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
        f"trainer.default_local_dir={place / checkpoints}",
        f"+ray_kwargs.ray_init.num_gpus={gpus}",
        "ray_kwargs.ray_init.num_cpus=24",
        f"+ray_kwargs.ray_init._temp_dir={temp}",
    ]


def over_fleet(
    place: Path,
    temp: str,
    steps: int,
    *,
    url: str,
    key: str,
    on_plane: bool = False,
    checkpoints: str = "checkpoints",
    records: Records | None = None,
) -> subprocess.Popen[str]:
    """verl's trainer over a fleet up to this step, from its last checkpoint where it has one. `on_plane` it serves its
    versions itself."""
    script = (
        "import sys\n"
        "from gyre_verl.main import main\n"
        "from gyre_verl.testing.cpu import OVERRIDES\n"
        "main([*OVERRIDES, *sys.argv[1:]])\n"
    )
    own = [
        f"fleet.url={url}",
        f"fleet.key={key}",
        "fleet.weights=plane" if on_plane else f"fleet.folder={place / 'policies'}",
    ]
    more = {}
    if records is not None:
        own.append(f"trainer.rollout_data_dir={records.trained_in(checkpoints)}")
        modules = f"{CPU_ENVIRONMENT['VERL_USE_EXTERNAL_MODULES']},verl_told"
        more = {
            "VERL_USE_EXTERNAL_MODULES": modules,
            "PYTHONPATH": str(records.modules),
            "GYRE_VERL_TOLD": str(records.told),
        }
    return _started(place, script, [*own, *overrides(place, temp, steps, checkpoints=checkpoints)], **more)


def alone(
    place: Path, temp: str, steps: int, *, servers: int, told: Path, ahead: int = 1
) -> subprocess.Popen[str]:
    """verl's `main_ppo` over servers of its own up to this step: they write what they do into `told`. It asks for so
    many batches ahead of training."""
    script = (
        "import sys\n"
        "from gyre_verl.testing.cpu import OVERRIDES\n"
        "from verl.trainer.main_ppo import main\n"
        "sys.argv[1:1] = OVERRIDES\n"
        "main()\n"
    )
    own = [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"trainer.v1.separate_async.num_warmup_batches={ahead}",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.name=cpu",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={servers}",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gyre_verl.testing.servers",
    ]
    return _started(
        place,
        script,
        [*own, *overrides(place, temp, steps, gpus=2 + servers)],
        VERL_USE_EXTERNAL_MODULES="gyre_verl.testing.cpu,gyre_verl.testing.servers",
        GYRE_VERL_SERVERS=str(told),
        RAY_DEDUP_LOGS="0",
        VERL_LOGGING_LEVEL="WARN",  # at INFO this mode of verl 0.9.1 raises where it logs
    )


def _started(place: Path, script: str, arguments: Sequence[str], **more: str) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))}
    return subprocess.Popen(
        [str(PYTHON), "-c", script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=kept | {"PYTHONUNBUFFERED": "1"} | CPU_ENVIRONMENT | more,
        cwd=place,
        start_new_session=True,
    )


@dataclass(frozen=True)
class Trained:
    """A row of verl's own record of a step: `uid` is of a prompt as it was drawn, `sample` its place in the group."""

    step: int
    uid: str
    sample: int
    prompt: str
    text: str


class Records:
    """What verl's runs asked, were answered and trained, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.told, self.modules = folder / "told", folder / "modules"
        self.told.mkdir(parents=True)
        self.modules.mkdir()
        shutil.copy(Path(__file__).with_name("verl_told.py"), self.modules)

    def trained_in(self, run: str) -> Path:
        """Where verl writes the steps of a run, which a resumed one goes on with."""
        return self._folder / f"trained-{run}"

    def trained(self, run: str) -> list[Trained]:
        """In the order of steps."""
        rows = []
        for file in sorted(self.trained_in(run).glob("*.jsonl"), key=lambda one: int(one.stem)):
            for line in file.read_text().splitlines():
                told = json.loads(line)
                uid, sample, _ = told["uid"].rsplit("_", 2)
                assert told["step"] == int(file.stem)
                rows.append(Trained(told["step"], uid, int(sample), told["input"], told["output"]))
        return rows

    def asked(self) -> list[str]:
        """The ids, as often as they were asked for. That of a request that is asked for again, for its connection
        broke, is here once."""
        return [one["asked"] for one in self._lines() if "asked" in one]

    def answered(self) -> list[tuple[str, list[int]]]:
        """Ids and tokens, as often as they came."""
        return [(one["answered"], one["token_ids"]) for one in self._lines() if "answered" in one]

    def _lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for file in sorted(self.told.glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]


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
