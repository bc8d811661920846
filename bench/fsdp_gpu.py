"""What a step of the job's FSDP2 actor costs beyond a bare FSDP2 loop over the same model, on one GPU.

    python bench/fsdp_gpu.py --out DIR [--shape 0.6B 1.7B] [--prompt-tokens 48 1024] [--pass-tokens 16384] [--json]
        [--lora RANK] [--dry-run]

All rows of a case are of one process and the same batches, in turn batch by batch, so that a machine that is busy for
a while is so for all of them:

    bare                 transformers' own model, sharded by `fully_shard`, bfloat16 with float32 weights and sums;
                         passes packed as densely as they go, on the device beforehand; cross-entropy, one clip, fused
                         AdamW. Its attention is the actor's, so that what is compared is the loop
    bare, transformers'  the same with transformers' own attention, which hides other sequences by a mask
    actor                the job's actor, called directly: kernels that give the same bits each time, micro-batches as
                         the trainer deals them out, metrics, log-probs kept for people to look at
    any kernels          the actor without the first of these
    weights              what the engines' copy of all weights takes, beside a step

With `--lora` both train an adapter beside the model: "bare" is then transformers' own model on the device, in bfloat16,
whose linear layers add the adapter by a hook.

A row has the median over its steps, and the best of them; "by bare" is the median of its batches' ratios, each to the
bare loop's time for the same batch, a moment before. `profile_<row>_<case>.txt` has the kernels of one step by
their time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import SHAPES, Case, Row, tokens_of  # noqa: E402

STEPS, WARM = 7, 2
ROWS = ["bare", "bare, transformers'", "actor", "any kernels", "weights"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the table, results.json and the profiles"
    )
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["0.6B", "1.7B"])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 1024])
    parser.add_argument(
        "--groups", type=int, default=0, help="a step's groups of 8; 64, or 32 of long prompts"
    )
    parser.add_argument("--pass-tokens", type=int, default=16384, help="most tokens of a pass of every row")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--lora", type=int, default=0, help="train an adapter of this rank")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    parser.add_argument("--dry-run", action="store_true", help="small, on CPUs: numbers without meaning")
    return parser


def main() -> int:
    given = arguments().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results: dict[str, Any] = {}
    for shape in ["tiny"] if given.dry_run else given.shape:
        with tempfile.TemporaryDirectory(prefix="fsdp_gpu_") as place:
            bench = None
            for prompt_tokens in given.prompt_tokens:
                case = case_of(given, shape, prompt_tokens)
                bench = bench or Bench(case, Path(place), given.pass_tokens, given.lora)
                name = f"{case.name}, an adapter of rank {given.lora}" if given.lora else case.name
                results[name] = bench.rows(case, given.out, given.rows)
                (given.out / "results.json").write_text(json.dumps(results, indent=1))
            assert bench is not None
            bench.close()
    text = table(results)
    (given.out / "table.md").write_text(text)
    print(json.dumps(results) if given.json else text)
    return 0


def case_of(given: argparse.Namespace, shape: str, prompt_tokens: int) -> Case:
    if given.dry_run:
        return Case(shape="tiny", groups=8, samples=4, prompt_tokens=min(prompt_tokens, 64), dry=True)
    return Case(
        shape=shape,
        groups=given.groups or (64 if prompt_tokens < 512 else 32),
        prompt_tokens=prompt_tokens,
    )


class Bench:
    """An actor and a bare model in this process."""

    def __init__(self, case: Case, place: Path, pass_tokens: int, rank: int = 0) -> None:
        import torch

        self.torch = torch
        self.cuda = not case.dry
        torch.set_num_threads(8 if self.cuda else 1)
        folder = case.model()
        config = case.spec(folder)["config"] | {"collective_timeout_s": 300.0}
        config.pop("megatron", None)
        config["fsdp"] = {
            "device": "cuda" if self.cuda else "cpu",
            "pass_tokens": pass_tokens if self.cuda else 512,
            "recompute": False,  # as the bare loop
        }
        if rank:
            config["lora"] = {"rank": rank, "alpha": 2.0 * rank}
        self.actor = self._actor(config, place)
        self.bare = BareAdapter(folder, self.actor) if rank else Bare(folder, self.actor)
        self.step = 0

    def _actor(self, config: Row, place: Path) -> Any:
        from gyre.workloads.base import WorkloadContext
        from gyre.workloads.fsdp.actor import FsdpActor

        actor = FsdpActor()
        actor.context = WorkloadContext("bench", "actor", 0, 1, config=config, directory=place)
        actor.setup()
        return actor

    def close(self) -> None:
        self.actor.teardown()

    def rows(self, case: Case, out: Path, wanted: list[str]) -> dict[str, Row]:
        batches = [case.batch(number) for number in range(STEPS)]
        took: dict[str, list[Row]] = {name: [] for name in wanted}
        for batch in batches:
            for name in wanted:
                took[name].append(self._timed(name, batch))
        for name in {"bare", "actor"} & set(wanted):
            path = out / f"profile_{name}_{case.shape}_{case.prompt_tokens}.txt"
            self._profiled(path, lambda name=name: self._timed(name, batches[0]))
        found = {name: summary(rows[WARM:]) for name, rows in took.items()}
        for name, row in found.items():
            pairs = zip(found.get("bare", {"steps_s": []})["steps_s"], row["steps_s"], strict=False)
            ratios = [bare / own for bare, own in pairs]
            row["of_bare"] = statistics.median(ratios) if ratios else None
            print(case.name, name, json.dumps(row), file=sys.stderr, flush=True)
        if self.cuda:
            memory = self.torch.cuda.max_memory_allocated() / 2**30
            print(case.name, f"{memory:.1f} GiB of both models", file=sys.stderr, flush=True)
        return found

    def _timed(self, name: str, batch: list[list[Any]]) -> Row:
        self._deterministic(on=name == "actor")
        if name == "weights":
            began = self._now()
            for _, tensor in self.actor.backend.weights():
                tensor.cpu()
            return {"seconds": self._now() - began, "tokens": 0}
        if name.startswith("bare"):
            passes = self.bare.passes(batch)
            began = self._now()
            self.bare.step(passes, own=name == "bare")
            return {"seconds": self._now() - began, "tokens": tokens_of(batch)}
        return self._one(batch)

    def _now(self) -> float:
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.monotonic()

    def _deterministic(self, *, on: bool) -> None:
        from gyre.workloads.learner.devices import make_deterministic

        if on:
            make_deterministic()
        else:
            self.torch.use_deterministic_algorithms(False)

    def _one(self, batch: list[list[Any]]) -> Row:
        """One optimizer step of the actor, and the seconds of its parts."""
        self.step += 1
        began = self._now()
        self.actor.begin(self.step)
        # Each step is of new groups, as the actor refuses those that it has trained.
        ids = []
        for index, groups in enumerate(batch):
            fresh = [
                replace(group, id=self.step * 100_000 + len(ids) + at) for at, group in enumerate(groups)
            ]
            ids += [group.id for group in fresh]
            self.actor.accumulate(fresh, step=self.step, index=index)
        accumulated = self._now()
        self.actor.apply(step=self.step, indices=len(batch), group_ids=ids)
        ended = self._now()
        return {
            "seconds": ended - began,
            "accumulate": accumulated - began,
            "apply": ended - accumulated,
            "tokens": tokens_of(batch),
        }

    def _profiled(self, path: Path, work: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]
        with profile(activities=kinds) as found:
            began = self._now()
            work()
            seconds = self._now() - began
        busy = sum(event.self_device_time_total for event in found.key_averages()) / 1e6
        head = f"{seconds:.3f} s under the profiler, {busy:.3f} s of kernels\n"
        by = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        path.write_text(head + found.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90))


class Bare:
    """Transformers' model under `fully_shard`, and a loop of a few lines over it."""

    def __init__(self, folder: Path, actor: Any) -> None:
        import torch

        self.torch, self.settings = torch, actor.settings
        backend = actor.backend
        self.device, self.pass_tokens = backend.device, backend.pass_tokens
        self._make(folder, backend)
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, fused=True)

    def _make(self, folder: Path, backend: Any) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM

        torch = self.torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(self.device)
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, backend.dtype), reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=backend.ranks.mesh, mp_policy=policy)
        fully_shard(self.model, mesh=backend.ranks.mesh, mp_policy=policy)

    def passes(self, batch: list[list[Any]]) -> list[Any]:
        from gyre.workloads.learner.losses import policy_rows
        from gyre.workloads.learner.packing import pack

        groups = [group for micro in batch for group in micro]
        packed = pack(policy_rows(groups, self.settings), max_tokens=self.pass_tokens)
        return [part.to(self.device) for part in packed]

    def step(self, passes: list[Any], *, own: bool) -> None:
        from gyre.workloads.fsdp.packed_attention import NAME, Segments

        torch, model = self.torch, self.model
        model.set_attn_implementation(NAME if own else "sdpa")
        count = sum(len(part.targets) for part in passes)
        for part in passes:
            more = {"segments": Segments.of(part.lengths, self.device)} if own else {}
            logits = model(
                input_ids=part.tokens[None], position_ids=part.positions[None], use_cache=False, **more
            ).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits.index_select(0, part.columns).float(), part.targets, reduction="sum"
            )
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class BareAdapter(Bare):
    """Transformers' model with an adapter at each of its linear layers but the output layer."""

    def _make(self, folder: Path, backend: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch, lora = self.torch, self.settings.lora
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, backend.dtype))
        self.model.to(self.device).requires_grad_(False)

        def added(layer: Any, given: tuple[Any], said: Any) -> Any:
            (x,) = given
            low = torch.nn.functional.linear(x, layer.lora_A.to(x.dtype))
            return said + torch.nn.functional.linear(low, layer.lora_B.to(x.dtype)) * (lora.alpha / lora.rank)

        for name, layer in self.model.named_modules():
            if type(layer) is torch.nn.Linear and name != "lm_head":
                layer.lora_A = self._parameter(lora.rank, layer.in_features)
                layer.lora_B = self._parameter(layer.out_features, lora.rank)
                layer.register_forward_hook(added)

    def _parameter(self, rows: int, columns: int) -> Any:
        return self.torch.nn.Parameter(0.01 * self.torch.randn(rows, columns, device=self.device))


def summary(rows: list[Row]) -> Row:
    row = {part: statistics.median(one[part] for one in rows) for part in rows[0] if part != "tokens"}
    tokens = sum(one["tokens"] for one in rows) / len(rows)
    return {
        **row,
        "tokens_s": tokens / row["seconds"],
        "best_s": min(one["seconds"] for one in rows),
        "steps_s": [round(one["seconds"], 4) for one in rows],
    }


def table(results: dict[str, dict[str, Row]]) -> str:
    lines = []
    for case, rows in results.items():
        lines += [
            f"## {case}",
            "",
            "| what | tokens/s | by bare | a step, s | best | accumulate | apply |",
        ]
        lines += ["| --- |" + " --- |" * 6]
        for name, row in rows.items():
            if name == "weights":
                lines.append(
                    f"| the weights, copied to the host | | | {row['seconds']:.3f} | {row['best_s']:.3f} | | |"
                )
                continue
            by_bare = f"{row['of_bare']:.3f}" if row["of_bare"] else ""
            parts = [f"{row[part]:.3f}" if part in row else "" for part in ("accumulate", "apply")]
            numbers = [f"{row['tokens_s']:,.0f}", by_bare, f"{row['seconds']:.3f}", f"{row['best_s']:.3f}"]
            label = name if name.startswith(("bare", "actor")) else f"actor, {name}"
            lines.append(f"| {' | '.join([label, *numbers, *parts])} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
