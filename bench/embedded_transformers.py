"""How many tokens the embedded engine makes of models that transformers computes, beside transformers' own generate.

    python bench/embedded_transformers.py [--json] [--models gemma3_text,mixtral] [--in-flight 1,16] [--repeat 3]

The models have random weights: hidden 256, 4 layers, 4 heads and 2 key-value heads of 64, 512 tokens; a window of 64
where the model has windows, 4 experts where it has experts. Float32, one thread, 128 new tokens at temperature 1 with
log-probs. Rows of one run, in turn, so that what else the machine does falls on all of them:

- `engine`: the core, stepped in this process; prompts of 16 tokens, none alike;
- `generate`: the same prompts by `generate`, on the whole batch at once and without log-probs;
- `engine, mixed`: prompts of 8 to 24 tokens and 64 to 192 new ones (128 in the mean), as jobs have them: samples leave
  the batch when they end, and as many more are waiting;
- `generate, mixed`: the same in two batches, with padding, each until its longest sample ends.

Tokens per CPU second are what to compare on a machine that is shared. Medians of `--repeat` rounds, with the spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.engine_requests import EngineRequest
from gyre.engines.embedded.token_sampling import Sampling
from gyre.engines.embedded.transformers_model import TransformersModel

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Asked = list[tuple[list[int], int]]
"""Prompts, each with the number of new tokens."""


@dataclass
class Row:
    model: str
    what: str
    in_flight: int
    tokens: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        rates = sorted(self.tokens / cpu for cpu in self.cpu_s)
        return {
            "model": self.model,
            "what": self.what,
            "in_flight": self.in_flight,
            "tokens_per_s": round(self.tokens / statistics.median(self.wall_s)),
            "tokens_per_cpu_s": round(statistics.median(rates)),
            "tokens_per_cpu_s_from": round(rates[0]),
            "tokens_per_cpu_s_to": round(rates[-1]),
        }


def equal(count: int, seed: int) -> Asked:
    draw = random.Random(seed)
    return [([draw.randrange(3, VOCAB) for _ in range(16)], 128) for _ in range(count)]


def mixed(count: int, seed: int) -> Asked:
    draw = random.Random(seed)
    lengths = [64 + 128 * index // max(1, 2 * count - 1) for index in range(2 * count)]
    draw.shuffle(lengths)
    return [([draw.randrange(3, VOCAB) for _ in range(draw.randint(8, 24))], new) for new in lengths]


def write_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{key: value for key, value in SHAPE.items() if knows(kind, key)})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def knows(kind: str, key: str) -> bool:
    return hasattr(CONFIG_MAPPING[kind](), key) or key == "head_dim"


def by_engine(folder: Path, running: int) -> Callable[[Asked], None]:
    model = TransformersModel(folder)
    with torch.inference_mode():
        weights = model.load(folder, torch.float32)
        core = EngineCore(model, weights, Limits(running, running * 4096, 4096))

    def generate(asked: Asked) -> None:
        for index, (prompt, new) in enumerate(asked):
            sampling = Sampling(max_new_tokens=new, ignore_eos=True)
            core.submit(EngineRequest(f"r{index}", prompt, sampling, index, 8, lambda update: None))
        made = 0
        with torch.inference_mode():
            while core.can_step:
                core.step()
                made += sum(len(update.tokens) for update in core.take_updates())
        assert made == sum(new for _, new in asked)

    return generate


def by_generate(folder: Path, running: int) -> Callable[[Asked], None]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def batch(asked: Sequence[tuple[list[int], int]]) -> None:
        longest = max(len(prompt) for prompt, _ in asked)
        new = max(count for _, count in asked)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in asked])
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=(ids != 0).long(),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
        assert made.shape[1] == longest + new

    def generate(asked: Asked) -> None:
        for start in range(0, len(asked), running):
            batch(asked[start : start + running])

    return generate


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    rows: list[Row] = []
    for kind in arguments.models:
        path = write_model(folder / kind, kind)
        for count in arguments.in_flight:
            ways = [("engine", by_engine(path, count)), ("generate", by_generate(path, count))]
            for suffix, work in (("", equal), (", mixed", mixed)):
                tokens = sum(new for _, new in work(count, 0))
                measured = [Row(kind, what + suffix, count, tokens) for what, _ in ways]
                for turn in range(arguments.repeat + 1):  # the first warms up
                    for row, (_, generate) in zip(measured, ways, strict=True):
                        gc.collect()
                        cpu, wall = time.process_time(), time.perf_counter()
                        generate(work(count, turn + 1000 * count))
                        if turn:
                            row.wall_s.append(time.perf_counter() - wall)
                            row.cpu_s.append(time.process_time() - cpu)
                rows += measured
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of models that transformers computes.")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["gemma3_text", "mistral", "mixtral"]
    )
    parser.add_argument("--in-flight", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row.data() for row in measure(arguments, Path(folder))]
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({**versions, "load": os.getloadavg()[0], "rows": rows}, indent=2))
        return
    print(f"{'model':14}{'':18}{'in flight':>10}{'tok/s':>9}{'tok/CPU-s':>11}   from .. to")
    for row in rows:
        print(
            f"{row['model']:14}{row['what']:18}{row['in_flight']:>10}{row['tokens_per_s']:>9,}"
            f"{row['tokens_per_cpu_s']:>11,}   {row['tokens_per_cpu_s_from']:,} .. {row['tokens_per_cpu_s_to']:,}"
        )


if __name__ == "__main__":
    main()
