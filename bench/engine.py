"""How many tokens the embedded engine makes, in this process and over its socket, beside transformers' generate.

    python bench/engine.py [--json] [--in-flight 1,16,64] [--dtypes float32,bfloat16] [--repeat 3]

The model is a Qwen3 of 3.4 million random weights (hidden 256, 4 layers, 4 heads and 2 key-value heads of 64, 512
tokens). Prompts are 16 random tokens each, none alike, with 128 new tokens at temperature 1 with log-probs; one thread.
Rows of one run, in turn, so that what else the machine does falls on all of them:

- `engine`: the core, stepped in this process;
- `engine, any bits`: the same without what makes a sample's bits independent of its batch (products are not padded to
  four rows), to see what that costs;
- `engine, http`: `python -m gyre.engines.embedded` with `--stream-interval 8`, asked by Gyre's client. CPU
  seconds are those of the engine's process alone;
- `transformers`: `generate` on the whole batch at once, without log-probs. Left out where it is not installed.

Tokens per CPU second are what to compare on a machine that is shared. Medians of `--repeat` rounds, with the spread.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from gyre.engines.dialect import GenerateRequest, SamplingParams
from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.decoder_model import DecoderModel, DecoderRunner
from gyre.engines.embedded.engine_requests import EngineRequest
from gyre.engines.embedded.invariance import KeyLengths, Scheme
from gyre.engines.embedded.token_sampling import Sampling
from gyre.engines.http_client import EngineClient
from gyre.models.architecture import read_architecture
from gyre.models.decoder import load_weights
from gyre.models.tensor_names import expected_shapes

VOCAB = 512
PROMPT_TOKENS = 16
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """Rounds of one way to generate with `in_flight` samples at once."""

    what: str
    dtype: str
    in_flight: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def data(self) -> dict[str, Any]:
        per_cpu_s = [self.tokens / seconds for seconds in self.cpu_s]
        return {
            "what": self.what,
            "dtype": self.dtype,
            "in_flight": self.in_flight,
            "tokens_per_s": round(statistics.median(self.tokens / seconds for seconds in self.wall_s)),
            "tokens_per_cpu_s": round(statistics.median(per_cpu_s)),
            "tokens_per_cpu_s_from": round(min(per_cpu_s)),
            "tokens_per_cpu_s_to": round(max(per_cpu_s)),
        }


def write_model(folder: Path, dtype: torch.dtype) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in expected_shapes(read_architecture(folder)).items()
    }
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def in_process(folder: Path, dtype: str, new_tokens: int, *, any_bits: bool) -> Callable[[int, int], None]:
    architecture = read_architecture(folder)
    with torch.inference_mode():
        weights = load_weights(folder, architecture, DTYPES[dtype])
        core = EngineCore(DecoderModel(architecture), weights, Limits(64, 64 * 4096, 4096))
    if any_bits:
        assert isinstance(core.runner, DecoderRunner)
        core.runner.scheme = Scheme(1, KeyLengths("fine"))
        core.runner._decoder._fewest_rows = 1

    def generate(count: int, seed: int) -> None:
        sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts(count, seed)):
            core.submit(EngineRequest(f"r{seed}-{index}", prompt, sampling, index, 8, lambda update: None))
        made = 0
        with torch.inference_mode():
            while core.can_step:
                core.step()
                made += sum(len(update.tokens) for update in core.take_updates())
        assert made == count * new_tokens

    return generate


def with_transformers(folder: Path, dtype: str, new_tokens: int) -> Callable[[int, int], None] | None:
    try:
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()

    def generate(count: int, seed: int) -> None:
        ids = torch.tensor(prompts(count, seed))
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
        assert made.shape[1] == PROMPT_TOKENS + new_tokens

    return generate


class Served:
    """The engine as a process, asked over its socket."""

    def __init__(self, folder: Path, dtype: str, new_tokens: int) -> None:
        command = [sys.executable, "-m", "gyre.engines.embedded", "--model-path", str(folder)]
        command += ["--port", "0", "--dtype", dtype, "--stream-interval", "8"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().split()[-1]
        self._watched = psutil.Process(self._process.pid)
        self._new_tokens = new_tokens

    def cpu_s(self) -> float:
        times = self._watched.cpu_times()
        return times.user + times.system

    def generate(self, count: int, seed: int) -> None:
        asyncio.run(self._generate(count, seed))

    async def _generate(self, count: int, seed: int) -> None:
        async with EngineClient(self._url) as client:

            async def one(index: int, prompt: list[int]) -> int:
                sampling = SamplingParams(self._new_tokens, ignore_eos=True, sampling_seed=index)
                request = GenerateRequest(f"{seed:04}-{index:04}", np.array(prompt, np.int32), sampling)
                return sum([len(chunk.token_ids) async for chunk in client.generate(request)])

            made = await asyncio.gather(*(one(*each) for each in enumerate(prompts(count, seed))))
        assert sum(made) == count * self._new_tokens

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    rows: list[Row] = []
    for dtype in arguments.dtypes:
        model = write_model(folder / dtype, DTYPES[dtype])
        new_tokens = arguments.new_tokens
        served = Served(model, dtype, new_tokens)
        ways: list[tuple[str, Callable[[int, int], None] | None, Callable[[], float]]] = [
            ("engine", in_process(model, dtype, new_tokens, any_bits=False), time.process_time),
            ("engine, any bits", in_process(model, dtype, new_tokens, any_bits=True), time.process_time),
            ("engine, http", served.generate, served.cpu_s),
            ("transformers", with_transformers(model, dtype, new_tokens), time.process_time),
        ]
        try:
            for count in arguments.in_flight:
                measured = [Row(what, dtype, count, tokens=count * new_tokens) for what, _, _ in ways]
                for turn in range(arguments.repeat + 1):  # the first warms up
                    for row, (_, generate, cpu_s) in zip(measured, ways, strict=True):
                        if generate is None:
                            continue
                        gc.collect()
                        cpu, wall = cpu_s(), time.perf_counter()
                        generate(count, turn + 1000 * count)
                        if turn:
                            row.wall_s.append(time.perf_counter() - wall)
                            row.cpu_s.append(cpu_s() - cpu)
                rows += [row for row in measured if row.wall_s]
        finally:
            served.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of the embedded engine.")
    parser.add_argument(
        "--in-flight", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64]
    )
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row.data() for row in measure(arguments, Path(folder))]
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "load": os.getloadavg()[0], "rows": rows}, indent=2))
        return
    print(f"{'':18}{'dtype':>10}{'in flight':>11}{'tok/s':>9}{'tok/CPU-s':>11}   from .. to")
    for row in rows:
        print(
            f"{row['what']:18}{row['dtype']:>10}{row['in_flight']:>11}{row['tokens_per_s']:>9,}"
            f"{row['tokens_per_cpu_s']:>11,}   {row['tokens_per_cpu_s_from']:,} .. {row['tokens_per_cpu_s_to']:,}"
        )


if __name__ == "__main__":
    main()
