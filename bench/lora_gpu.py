"""What adapters cost an engine, and whether its log-probs are those of the adapters, on one GPU.

    python bench/lora_gpu.py --out DIR [--shape 1.7B] [--rank 32] [--prompt-tokens 48] [--json] [--dry-run]

All rows are of the same prompts, 512 samples of 256 tokens at once. The first is of an SGLang of its own, the others of
one that takes adapters; "by the model" is the ratio to the first.

    the model        an engine that takes no adapters
    none             an engine that does, of requests that name none
    one              all requests name one adapter
    three            a third of them each of three
    loading          as three, while further adapters are loaded and unloaded: no sample names them

`load_s` and `unload_s` are what the client waits for; `silence_s` is the longest time for which no token of any sample
came, after the first.

Log-probs: of samples of each adapter, the engine's against transformers' model with the adapter added by hand, in
bfloat16 and in float32; against the next adapter's, which is what a mistake would look like; and of samples without an
adapter, against the model's. With `--dry-run` the
embedded engine does all of it on a CPU, small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import SHAPES, TRITON, Case, Row  # noqa: E402
from job_plane.generation import CHUNK_TOKENS, READY_WITHIN_S  # noqa: E402

ENGINE_PATH = "LORA_GPU_ENGINE_PATH"
"""The PYTHONPATH of SGLang, where it wants other packages than FSDP2's back end."""

ADAPTERS = ("1", "2", "3")
TOGETHER = 16
CHECKED = 8
"""Samples of each adapter whose log-probs are compared."""

LOADS_S = 1.0
"""Between loads while samples run."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for table.md and results.json")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.7B")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    parser.add_argument("--dry-run", action="store_true", help="small, on CPUs: numbers without meaning")
    return parser


def main() -> int:
    given = arguments().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    case = Case(
        shape="tiny" if given.dry_run else given.shape, prompt_tokens=given.prompt_tokens, dry=given.dry_run
    )
    samples = 24 if given.dry_run else given.samples
    with tempfile.TemporaryDirectory(prefix="lora_gpu_") as place:
        folders = write_adapters(case.model(), Path(place), given.rank)
        results: Row = {"case": f"{case.shape}, rank {given.rank}, prompts of {case.prompt_tokens}"}
        results["rows"] = asyncio.run(measure(case, folders, given.rank, samples))
        checked = results["rows"].pop("samples")
        results["log_probs"] = compare(case, folders, checked, dry=given.dry_run)
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (given.out / "table.md").write_text(text)
    print(json.dumps(results) if given.json else text)
    return 0


def write_adapters(base: Path, place: Path, rank: int) -> dict[str, Path]:
    """Policy versions with drawn weights, whose part is a few hundredths of the model's."""
    import torch
    from safetensors.torch import save_file

    from gyre.config.sections import LoraSettings
    from gyre.models.adapters import ADAPTER_CONFIG, config_of_published, in_file, model_print
    from gyre.models.safetensors_folder import SafetensorsFolder
    from gyre.workloads.fsdp.lora import peft_config

    settings = LoraSettings(rank=rank, alpha=2.0 * rank)
    source = SafetensorsFolder(base)
    layers = sorted(name.removesuffix(".weight") for name in source.names if name.endswith("_proj.weight"))
    record = {"rank": rank, "alpha": settings.alpha, "layers": layers}
    config = config_of_published(peft_config(record, str(base.resolve())), model_print(base))
    found = {}
    for name in (*ADAPTERS, "4"):
        generator = torch.Generator().manual_seed(int(name))
        named = {}
        for layer in layers:
            rows, columns = source(f"{layer}.weight").shape
            named[in_file(f"{layer}.lora_A")] = torch.randn(rank, columns, generator=generator) / columns**0.5
            named[in_file(f"{layer}.lora_B")] = (
                0.02 * torch.randn(rows, rank, generator=generator) / rank**0.5
            )
        folder = found[name] = place / name
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_bytes(config)
        (folder / "config.json").write_text((base / "config.json").read_text())
        save_file(named, folder / "model.safetensors")
    return found


# -- the engine ---------------------------------------------------------------------------------------


def engine_command(case: Case, rank: int) -> Any:
    from gyre.engines.sglang.command import sglang_command
    from gyre.models.adapters import AdapterLimits
    from gyre.rollouts.agent.agent import JobWishes
    from gyre.rollouts.agent.join import EngineCommands

    limits = AdapterLimits(rank) if rank else None
    if case.dry:
        wishes = JobWishes(adapters=limits)
        return EngineCommands("embedded", max_running=16, kv_tokens=1 << 15, wishes=wishes).command(
            case.model(), "base"
        )
    large = ["--max-running-requests", "512", "--cuda-graph-max-bs", "512", "--disable-radix-cache"]
    return sglang_command(
        case.model(),
        weight_version="base",
        adapters=limits,
        extra=[*TRITON, *large],
        env={
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.environ.get(ENGINE_PATH, os.environ.get("PYTHONPATH", "")),
        },
    )


class Asking:
    """Samples asked of one engine. `came` has the time and the number of tokens of each chunk."""

    def __init__(self, case: Case, client: Any) -> None:
        self._case, self._client = case, client
        self._asked = 0
        self.came: list[tuple[float, int]] = []

    async def all(self, samples: int, names: Sequence[str]) -> tuple[Row, list[Row]]:
        """So many at once, under these adapters in turn: tokens/s, and the samples."""
        self.came = []
        began = time.monotonic()
        parts = [
            self._some(range(at, min(at + TOGETHER, samples)), names) for at in range(0, samples, TOGETHER)
        ]
        made = [one for some in await asyncio.gather(*parts) for one in some]
        seconds = time.monotonic() - began
        times = sorted(at for at, _ in self.came)
        silence = max((after - before for before, after in pairwise(times)), default=0.0)
        tokens = sum(len(one["tokens"]) for one in made)
        return {"tokens_s": tokens / seconds, "seconds": seconds, "silence_s": silence}, made

    async def _some(self, indexes: Sequence[int], names: Sequence[str]) -> list[Row]:
        import numpy as np

        from gyre.engines.dialect import GenerateRequest, SamplingParams

        case, requests, made = self._case, [], []
        for index in indexes:
            self._asked += 1
            prompt = case.prompts().prompt(index).prompt_ids
            adapter = names[index % len(names)]
            sampling = SamplingParams(case.new_tokens, temperature=1.0, ignore_eos=True)
            rid = f"{self._asked:020d}"
            chunk = 0 if case.dry else CHUNK_TOKENS
            requests.append(GenerateRequest(rid, prompt, sampling, chunk_tokens=chunk, adapter=adapter))
            made.append({"prompt": prompt, "adapter": adapter, "tokens": [], "logprobs": []})
        async with aclosing(self._client.generate_many(requests)) as chunks:
            async for at, part in chunks:
                self.came.append((time.monotonic(), len(part.token_ids)))
                made[at]["tokens"].append(part.token_ids)
                made[at]["logprobs"].append(part.logprobs)
        for one in made:
            one["tokens"], one["logprobs"] = (np.concatenate(one[key]) for key in ("tokens", "logprobs"))
        return made


async def measure(case: Case, folders: dict[str, Path], rank: int, samples: int) -> Row:
    from gyre.engines.process import EngineProcess

    rows: Row = {}
    for takes in (0, rank):
        began = time.monotonic()
        async with EngineProcess(engine_command(case, takes), ready_within_s=READY_WITHIN_S) as engine:
            print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            client = engine.client()
            try:
                await client.freeze_gc()
                asking = Asking(case, client)
                await asking.all(samples, [""])  # kernels are compiled, graphs touched
                name = "none" if takes else "the model"
                rows[name], made = await asking.all(samples, [""])
                if takes:
                    rows["samples"] = made[:CHECKED]
                    await with_adapters(asking, client, folders, samples, rows)
            finally:
                await client.close()
    return rows


async def with_adapters(
    asking: Asking, client: Any, folders: dict[str, Path], samples: int, rows: Row
) -> None:
    loads = [await timed(client.load_adapter(name, folders[name])) for name in ADAPTERS]
    await asking.all(samples, ADAPTERS)  # the first use of each brings it to the device
    rows["one"], _ = await asking.all(samples, ADAPTERS[:1])
    rows["three"], made = await asking.all(samples, ADAPTERS)
    rows["samples"] += [
        one for name in ADAPTERS for one in [one for one in made if one["adapter"] == name][:CHECKED]
    ]
    unloads: list[float] = []

    async def load_on() -> None:
        while True:
            loads.append(await timed(client.load_adapter("4", folders["4"])))
            unloads.append(await timed(client.unload_adapter("4")))
            await asyncio.sleep(LOADS_S)

    loading = asyncio.create_task(load_on())
    try:
        rows["loading"], _ = await asking.all(samples, ADAPTERS)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    rows["loading"] |= {
        "loads": len(unloads),
        "load_s": statistics.median(loads[len(ADAPTERS) :] or loads),
        "unload_s": statistics.median(unloads or [0.0]),
        "idle_load_s": statistics.median(loads[: len(ADAPTERS)]),
    }


async def timed(call: Any) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began


# -- log-probs ----------------------------------------------------------------------------------------


def compare(case: Case, folders: dict[str, Path], samples: list[Row], *, dry: bool) -> Row:
    """Mean and largest absolute differences to transformers' model, by precision; with the wrong adapter as well."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cpu" if dry else "cuda"
    found: Row = {}
    on: dict[str, Any] = {}

    def added(layer: Any, given: tuple[Any], said: Any) -> Any:
        if not on["now"]:
            return said
        a, b = (on["now"][f"base_model.model.{layer.own_name}.lora_{one}.weight"] for one in "AB")
        return said + torch.nn.functional.linear(torch.nn.functional.linear(given[0], a), b) * 2.0

    for dtype in (torch.float32,) if dry else (torch.bfloat16, torch.float32):
        model: Any = AutoModelForCausalLM.from_pretrained(case.model(), dtype=dtype).to(device).eval()
        adapters = {name: tensors_of(folders[name], device, dtype) for name in ADAPTERS}
        for name, layer in model.named_modules():
            if type(layer) is torch.nn.Linear and name != "lm_head":
                layer.own_name = name
                layer.register_forward_hook(added)
        alone = [one for one in samples if not one["adapter"]]
        named = [one for one in samples if one["adapter"]]
        for what, some, shift in (
            ("", named, 0),
            (", of another adapter", named, 1),
            (", of none", alone, 0),
        ):
            differences = []
            for one in some:
                on["now"] = (
                    one["adapter"]
                    and adapters[ADAPTERS[(ADAPTERS.index(one["adapter"]) + shift) % len(ADAPTERS)]]
                )
                prompt = torch.tensor(one["prompt"].tolist(), device=device)
                tokens = torch.tensor(one["tokens"].tolist(), device=device)
                with torch.no_grad():
                    logits = model(torch.cat((prompt, tokens))[None]).logits[0, len(prompt) - 1 : -1].float()
                said = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
                differences.append((said - torch.from_numpy(one["logprobs"].copy())).abs())
            whole = torch.cat(differences)
            found[f"{str(dtype).removeprefix('torch.')}{what}"] = {
                "mean": float(whole.mean()),
                "p99": float(whole.quantile(0.99)),
                "largest": float(whole.max()),
            }
        del model
    return found


def tensors_of(folder: Path, device: str, dtype: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: one.to(device=device, dtype=dtype)
        for name, one in load_file(folder / "model.safetensors").items()
    }


def table(results: Row) -> str:
    rows = results["rows"]
    base = rows["the model"]["tokens_s"]
    lines = [
        f"## {results['case']}",
        "",
        "| engine | tokens/s | by the model | silence, s |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {row['tokens_s']:,.0f} | {row['tokens_s'] / base:.2f} | {row['silence_s']:.3f} |"
        for name, row in rows.items()
    ]
    loading = rows["loading"]
    lines += [
        "",
        f"A load takes {loading['idle_load_s']:.3f} s beside nothing, {loading['load_s']:.3f} s beside all samples "
        f"(an unload {loading['unload_s']:.3f} s); {loading['loads']} were made.",
        "",
        "| log-probs of the engine against transformers' in | mean | 99th percentile | largest |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {row['mean']:.2g} | {row['p99']:.2g} | {row['largest']:.2g} |"
        for name, row in results["log_probs"].items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
