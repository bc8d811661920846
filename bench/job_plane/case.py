"""A case of `job_gpu.py`: a model's shape, prompts, lengths, how many steps. Its job, and its batches."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from job_plane.load import LONGEST, TOOL_TOKENS, RandomPrompts

from gyre.rollouts.samples import Group, Sample, VersionRun

Row = dict[str, Any]

BENCH = Path(__file__).resolve().parents[1]

SHAPES: dict[str, Row] = {
    "tiny": {"hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2},
    "0.6B": {"hidden": 1024, "inner": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "layers": 28},
    "1.7B": {"hidden": 2048, "inner": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "layers": 28},
    "4B": {"hidden": 2560, "inner": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 36},
    "8B": {"hidden": 4096, "inner": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 36},
}
"""Qwen3's. 4B and 8B want more GPUs than one for their trainer: with Adam its states alone have 58 GB and 126 GB."""

VOCAB = 640
RARE = (VOCAB - 3, VOCAB - 2)
"""Tokens that come once in some 4,700."""

LENGTHS = ("equal", "lognormal", "anywhere")

TRITON = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
"""Kernels that need no compiler on the machine."""


@dataclass(frozen=True)
class Case:
    """`lengths`: `equal`, all of `new_tokens`; `anywhere`, which end at any of `new_tokens` tokens by a stop token that
    comes once in some 640; `lognormal`, where a prompt's samples have a limit in common (median 482), and one in five
    ends before it by a stop token: median 400, at most `new_tokens`."""

    shape: str = "0.6B"
    groups: int = 64
    samples: int = 8
    prompt_tokens: int = 48
    lengths: str = "anywhere"
    steps: int = 15
    engines: int = 1
    dry: bool = False
    example: str = "grpo_gsm8k.yaml"
    ranks: int = 1
    tensor_parallel: int = 1
    backend: str = ""
    """`fsdp` where the example's is another; "": the example's."""
    turns: int = 1
    """With more than one, agents run sessions of so many, and `lengths` are those of a turn."""

    @property
    def name(self) -> str:
        by = "" if self.example == Case.example else f", {self.example.partition('.')[0]}"
        by += f", {self.backend}" if self.backend else ""
        by += f", {self.turns} turns" if self.turns > 1 else ""
        if self.ranks > 1:
            by += f", {self.ranks} ranks" + (
                f" (TP {self.tensor_parallel})" if self.tensor_parallel > 1 else ""
            )
        return f"{self.shape} {self.lengths}, prompts of {self.prompt_tokens}{by}"

    @property
    def new_tokens(self) -> int:
        if self.dry:
            return 48 if self.lengths == "lognormal" else 32
        return LONGEST if self.lengths == "lognormal" else 256

    @property
    def longest_row(self) -> int:
        return self.prompt_tokens + self.turns * (self.new_tokens + TOOL_TOKENS)

    @property
    def stop_token_ids(self) -> list[int]:
        if self.lengths == "anywhere":
            return list(range(VOCAB - 24, VOCAB - 16)) if self.dry else [VOCAB - 1]
        return list(RARE) if self.lengths == "lognormal" else []

    @property
    def ends_once_in(self) -> float:
        """Tokens to a stop token, on average."""
        if self.lengths == "anywhere":
            return VOCAB / len(self.stop_token_ids)
        return VOCAB * 7.4 / len(RARE) if self.lengths == "lognormal" else float("inf")

    @property
    def micro_groups(self) -> int:
        return max(self.groups // 4, 1)

    @property
    def task(self) -> Row:
        return {
            "vocab": VOCAB,
            "prompt_tokens": self.prompt_tokens,
            "stop_token_ids": self.stop_token_ids,
            "longest": self.new_tokens if self.lengths == "lognormal" else 0,
        }

    def prompts(self) -> RandomPrompts:
        return RandomPrompts({}, **self.task)

    # -- files --------------------------------------------------------------------------------------

    @property
    def scratch(self) -> Path:
        return Path(os.environ.get("TMPDIR", "/tmp")) / f"job_gpu_{self.shape}"

    def model(self) -> Path:
        """The folder of the model, which is written where it is not there."""
        from job_plane.model import model_main

        folder, partial = self.scratch / "model", self.scratch / "model.partial"
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            self.scratch.mkdir(parents=True, exist_ok=True)
            model_main(
                {
                    "folder": str(partial),
                    "shape": SHAPES[self.shape] | {"vocab": VOCAB},
                    "threads": os.cpu_count() or 1,
                    "bf16": not self.dry,
                    "seed": 1,
                    "rare": RARE,
                }
            )
            partial.rename(folder)
        return folder

    def spec(self, folder: Path) -> Row:
        """The shipped example, over the bench's model, data and reward."""
        import yaml

        spec: Row = yaml.safe_load((BENCH.parent / "examples" / self.example).read_text())
        config = spec["config"]
        del config["data"]
        config["task"] = {"name": "job_plane.load:RandomPrompts", "options": self.task}
        config["reward"] = {"function": "job_plane.load:even_share", "processes": 2 if self.dry else 8}
        config["model_path"] = str(folder)
        if self.backend and self.backend != spec.get("backend"):
            spec["backend"] = self.backend
            config[self.backend] = {"pass_tokens": config.pop("megatron")["pass_tokens"]}
            del spec["roles"]["actor"]["entrypoint"]
        if self.tensor_parallel > 1:
            config["megatron"]["tensor_parallel"] = self.tensor_parallel
        config["sampling"] |= {"n": self.samples, "max_new_tokens": self.new_tokens}
        spec["python_path"] = [str(BENCH)]
        spec["run"] |= {
            "steps": self.steps,
            "prompts_per_step": self.groups,
            "groups_per_micro_batch": self.micro_groups,
            "checkpoint_every": 10,
            "evaluate_every": 0,
        }
        if self.turns > 1:
            # Every group of two steps may be open at once: max_staleness of the example is 1.
            config["agent"] = {
                "function": "job_plane.load:random_turns",
                "options": {"turns": self.turns, "vocab": VOCAB},
                "max_turns": self.turns,
                "max_tokens": self.longest_row,
                "concurrency": self.groups * self.samples,
            }
            del config["reward"], spec["roles"]["reward"]
            spec["roles"]["agent"] = {"total": 2}
        spec["roles"]["rollout"]["total"] = self.engines
        spec["roles"]["actor"]["total"] = self.ranks
        if self.dry:
            spec |= {"device_type": "CPU", "device_per_node": max(4, self.ranks + self.engines)}
            spec["rollouts"] = {"engine": "embedded"}
            config["megatron" if "megatron" in config else "fsdp"] |= {"pass_tokens": 512}
            spec["run"] |= {"min_tokens_per_micro_batch": 256}
        else:
            spec["device_per_node"] = self.ranks + self.engines
            spec["rollouts"] |= {
                "engine_args": TRITON,
                "context_length": max(2048, self.longest_row + 8),
            }
        return spec

    # -- batches ------------------------------------------------------------------------------------

    def batch(self, number: int) -> list[list[Group]]:
        """The micro-batches of a step, with samples as long as the engine's would be."""
        prompts, generator = self.prompts(), np.random.default_rng((7, number))
        groups = []
        for at in range(self.groups):
            group = prompts.prompt(number * self.groups + at)
            most = group.token_limit(self.new_tokens)
            for _ in range(self.samples):
                length = most
                if self.stop_token_ids:
                    length = min(most, int(generator.geometric(1.0 / self.ends_once_in)))
                group.samples.append(_sample(generator, length))
            groups.append(group)
        return self.micro_batches(groups)

    def micro_batches(self, groups: list[Group]) -> list[list[Group]]:
        return [groups[at : at + self.micro_groups] for at in range(0, len(groups), self.micro_groups)]


def _sample(generator: np.random.Generator, length: int) -> Sample:
    ids = generator.integers(0, VOCAB, length, dtype=np.int32)
    logprobs = np.full(length, -float(np.log(VOCAB)), np.float32)
    return Sample(ids, logprobs, (VersionRun(0, 0, length),), "length", reward_of(ids))


def reward_of(ids: Any) -> float:
    return float(np.mean(ids % 2 == 0))


def tokens_of(micro_batches: list[list[Group]]) -> int:
    """New tokens."""
    return sum(group.token_count for groups in micro_batches for group in groups)


def best_by_hand(case: Case) -> dict[str, list[str]]:
    """The settings that the bare engine is tried with, by name; its best is what counts. A prompt of 48 tokens is not
    worth a cache; one of 1,024, which eight samples share, is."""
    large = ["--max-running-requests", "512", "--cuda-graph-max-bs", "512"]
    if case.prompt_tokens < 512:
        return {"no radix cache": [*large, "--disable-radix-cache"]}
    return {"radix cache": large}
