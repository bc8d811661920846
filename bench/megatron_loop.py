"""How fast the Megatron actor trains, beside a bare loop over the same model.

    python bench/megatron_loop.py [--shape tiny|qwen3-0.6b|qwen3-1.7b] [--json FILE] [--steps 10] [--rows 8]
        [--sequence 2048] [--pass-tokens 8192] [--nondeterministic] [--repeat 1]

Each row is a process of its own, one after another on one device (the GPU where there is one), with the same random
weights, `--rows` sequences of `--sequence` tokens a step, and the same tokens in a pass:

- `bare`: Megatron's own schedule, gradient finalisation and optimizer over its GPTModel with the layers of
  `gyre.workloads.megatron.model.gpt` (without Transformer Engine it has no attention of its own that could be used),
  its own cross entropy, dense rows. Nothing of Gyre beyond that;
- `policy`: `MegatronPolicy` on packed passes: the policy's loss, log-probs and entropies;
- `actor`: `begin`, `accumulate` twice, `apply`, from groups of samples to new weights, without a host copy of them;
- `actor, published`: the same with the host copy.

Tokens are those that go through the model. The first `--warm` steps do not count. Medians, with the spread over steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import numpy as np
import torch

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import WorkloadContext

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "eos_token_id": 1,
}
ROWS = ("bare", "policy", "actor", "actor, published")


def main() -> None:
    parser = argparse.ArgumentParser(description="The Megatron actor beside a bare Megatron loop.")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=8, help="sequences in a step")
    parser.add_argument(
        "--sequence", type=int, default=None, help="tokens in each; 2048, and 128 of the tiny shape"
    )
    parser.add_argument(
        "--pass-tokens", type=int, default=None, help="a quarter of a step's tokens by default"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1, help="rounds, the rows of each in turn")
    parser.add_argument("--nondeterministic", action="store_true", help="what the actor may use on GPUs")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", choices=ROWS, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sequence = options.sequence or (128 if options.shape == "tiny" else 2048)
    options.pass_tokens = options.pass_tokens or max(options.sequence, options.rows * options.sequence // 4)
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for _ in range(options.repeat):
        for name in ROWS:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    device = found["bare"][0]["device"]
    print(
        f"{options.shape}, {options.rows} x {options.sequence} tokens a step, torch {torch.__version__}, {device}"
    )
    print(
        f"{'':>18}  {'tokens/s':>9}  {'of bare':>7}  {'step s (min..max)':>22}"
        f"  {'update s':>8}  {'copy s':>7}  {'GiB':>5}"
    )
    bare = statistics.median(run["tokens_per_s"] for run in found["bare"])
    for name, runs in found.items():
        rate = statistics.median(run["tokens_per_s"] for run in runs)
        seconds = [value for run in runs for value in run["seconds"]]
        spread = f"{statistics.median(seconds):.4f} ({min(seconds):.4f}..{max(seconds):.4f})"
        update, copy = (
            statistics.median(run.get(key, 0.0) for run in runs) for key in ("update_s", "copy_s")
        )
        peak = max(run["peak_gib"] for run in runs)
        print(
            f"{name:>18}  {rate:9.0f}  {rate / bare:7.3f}  {spread:>22}  {update:8.4f}  {copy:7.4f}  {peak:5.1f}"
        )
    if options.json:
        facts = {key: str(value) for key, value in vars(options).items() if key not in ("json", "only")}
        options.json.write_text(json.dumps({"options": facts, "rows": found}, indent=1))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    step, close = {"bare": bare_loop, "policy": policy_loop}.get(name, actor_loop)(options, name)
    seconds: list[float] = []
    extra: dict[str, list[float]] = {}
    try:
        for index in range(options.warm + options.steps):
            _settle()
            started = time.perf_counter()
            told = step(index)
            _settle()
            if index >= options.warm:
                seconds.append(time.perf_counter() - started)
                for key, value in told.items():
                    extra.setdefault(key, []).append(value)
    finally:
        close()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread",
        "seconds": seconds,
        "tokens_per_s": options.rows * options.sequence / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        **{key: statistics.median(values) for key, values in extra.items()},
    }


Loop = tuple[Callable[[int], dict[str, float]], Callable[[], None]]


def bare_loop(options: argparse.Namespace, name: str) -> Loop:
    from gyre.config.sections import MegatronSettings
    from gyre.workloads.megatron.model.devices import device_of, dtype_of
    from gyre.workloads.megatron.model.seam import open_seam

    settings = MegatronSettings()
    device = device_of(settings)
    dtype = dtype_of(settings, device)
    seam = open_seam(device)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from gyre.models.first_weights import SeededWeights
    from gyre.workloads.megatron.model.config import architecture_from, transformer_config
    from gyre.workloads.megatron.model.gpt import build_model
    from gyre.workloads.megatron.model.hugging_face import import_weights
    from gyre.workloads.megatron.model.parallel import Ranks

    architecture = architecture_from(hugging_face(options), "bench")
    context = WorkloadContext("bench", "actor", 0, 1)
    ranks = Ranks(context, settings, device=device, timeout_s=60.0, seed=1)
    config = transformer_config(architecture, settings, device=device, dtype=dtype)
    config.finalize_model_grads_func = finalize_model_grads
    with seam():
        model = build_model(architecture, config, first_stage=True, last_stage=True, device=device)
        import_weights(model, architecture, ranks, SeededWeights(architecture, 1, device))
        inner = Float16Module(config, model) if dtype != torch.float32 else model
        ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            inner,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-6,
                min_lr=0.0,
                weight_decay=0.0,
                clip_grad=1.0,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [ddp],
        )
    for group in optimizer.param_groups:
        group["fused"] = True
    height = max(1, options.pass_tokens // options.sequence)
    batches = [
        torch.from_numpy(drawn[:, :]).to(device)
        for drawn in np.array_split(tokens_of(options, options.sequence + 1), -(-options.rows // height))
    ]

    def forward(queue: Any, which: Any) -> Any:
        tokens = next(queue)
        losses = which(tokens[:, :-1], None, None, labels=tokens[:, 1:])

        def of_output(output: torch.Tensor) -> Any:
            count = torch.tensor(output.numel(), dtype=torch.int, device=device)
            return output.float().sum(), count, output.detach().sum()

        return losses, of_output

    def step(index: int) -> dict[str, float]:
        with seam():
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=[ddp],
                num_microbatches=len(batches),
                seq_length=options.sequence,
                micro_batch_size=height,
                forward_only=False,
            )
            optimizer.step()
        return {}

    return step, ranks.close


def make_actor(options: argparse.Namespace) -> Any:
    from gyre.workloads.megatron.actor import MegatronActor

    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    (folder / "config.json").write_text(json.dumps(hugging_face(options)))
    actor = MegatronActor()
    actor.context = WorkloadContext(
        "bench",
        "actor",
        0,
        1,
        config={
            "seed": 1,
            "task": {},  # prompts are made up: no data set is read
            "optim": {"lr": 1e-6, "warmup_steps": 0},
            "megatron": {
                "model_path": str(folder),
                "pass_tokens": options.pass_tokens,
                "deterministic": not options.nondeterministic,
            },
        },
    )
    actor.setup()
    (folder / "config.json").unlink()
    folder.rmdir()
    actor.warm_start()
    return actor


def policy_loop(options: argparse.Namespace, name: str) -> Loop:
    actor = make_actor(options)
    from gyre.workloads.megatron.steps.gradients import packed_policy_loss
    from gyre.workloads.megatron.steps.packing import Row, pack

    length = options.sequence
    rows = [
        Row(
            row[:1],
            row[1:],
            {"advantages": np.ones(length, np.float32), "engine": np.full(length, -11.9, np.float32)},
        )
        for row in tokens_of(options, length + 1).astype(np.int32)
    ]
    passes = list(pack(rows, max_tokens=options.pass_tokens))

    def step(index: int) -> dict[str, float]:
        actor.policy.backward(
            passes,
            lambda part, logprobs, entropies: packed_policy_loss(part, logprobs, entropies, actor.settings),
            temperature=1.0,
        )
        actor.policy.step(count=options.rows * length, lr=1e-6)
        return {}

    return step, actor.teardown


def actor_loop(options: argparse.Namespace, name: str) -> Loop:
    actor = make_actor(options)
    actor.takes_snapshots = name == "actor, published"
    length = options.sequence

    def step(index: int) -> dict[str, float]:
        number = actor.step + 1
        rows = tokens_of(options, length + 1, seed=index).astype(np.int32)
        groups = [
            Group(
                id=index * options.rows + at,
                prompt_ids=rows[at][:1],
                samples=[
                    Sample(
                        token_ids=row[1:],
                        logprobs=np.full(length, -11.9, np.float32),
                        versions=(VersionRun(0, 0, length),),
                        reward=float(which),
                    )
                    for which, row in enumerate(rows[at : at + 2])
                ],
            )
            for at in range(0, options.rows, 2)
        ]
        actor.begin(number)
        half = len(groups) // 2
        for at, part in enumerate((groups[:half], groups[half:])):
            actor.accumulate(part, step=number, index=at)
        actor.apply(step=number, indices=2, group_ids=[group.id for group in groups])
        return {"update_s": actor.timings["update"], "copy_s": actor.timings["snapshot"]}

    return step, actor.teardown


def hugging_face(options: argparse.Namespace) -> dict[str, Any]:
    return {**COMMON, **SHAPES[options.shape]}


def tokens_of(options: argparse.Namespace, width: int, seed: int = 0) -> Any:
    vocab = SHAPES[options.shape]["vocab_size"]
    return np.random.default_rng(seed).integers(0, vocab, (options.rows, width))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
