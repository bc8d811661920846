"""One engine over several GPUs, as an instance of Gyre's plane: versions are loaded into all its ranks under load, and
its samples must be those of the loaded weights.

Versions alternate between two models that share only their shape. So a token's log-prob tells its version, and Megatron
computes the right one with the same weights:

    clean   samples of one version: the engine's log-probs are Megatron's, within the tolerance of the precision. A rank
            with another rank's part of the weights would show here. So would a sample that began while a version was
            loaded and has keys, values or a token of the previous version. Such samples are counted, and classified by
            whether their first token is of the previous version.
    mixed   samples that ran while a version was loaded: up to the recorded start of their second version, the log-probs
            are the first version's, and after it they are not. (Later tokens come from the new weights over the old
            ones' keys and values, which no single model would compute.) An engine that does not tell spans (SGLang
            0.5.17) labels the tokens of one message with the older version: new weights may then begin up to a message
            before the boundary.

`Versions` does both; it publishes as the loop's trainer does: an actor's weights, by its arena, to the receiver.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gpu_plane.engine_command import API_KEY
from gpu_plane.plane import Plane
from gpu_plane.scale import Ask
from gpu_plane.trainer import Trainer
from training_loop.actors.actor import ActorProcess, Row, Work, now
from training_loop.trainer import Shape

TOLERANCES = {"mean_abs": 0.06, "p99_abs": 0.25}
"""Tolerances in nats for bfloat16: an engine of one rank differs by 0.03 and 0.11 from Megatron."""
EXACT = {"mean_abs": 1e-4, "p99_abs": 1e-3}
"""Tolerances for float32."""
APART, APART_EXACT = 0.75, 0.02
"""A log-prob that differs more than this from a version's is not of that version."""

TELLS_SPANS = (0, 5, 23)
"""The first known SGLang that tells which version made which tokens."""

CHECKED = 48
"""Number of samples checked of each kind and model."""


def over_devices(command: Callable[..., Any], ranks: int, devices: str) -> Callable[..., Any]:
    """`command`, with the engine over `ranks` of `devices`; on CPUs one core each."""

    def spread(*given: Any, **named: Any) -> Any:
        found = command(*given, **named)
        argv = [*found.argv, "--tp-size", str(ranks)]
        env = dict(found.env)
        if "SGLANG_USE_CPU_ENGINE" in env:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(ranks))
        else:
            # The actor is on one of them. All sums by NCCL: what SGLang has for it was not tried with Gyre.
            env |= {"CUDA_VISIBLE_DEVICES": devices, "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
            argv.append("--disable-custom-all-reduce")
        return replace(found, argv=tuple(argv), env=env)

    return spread


def tokens_a_message(engine: str) -> int:
    """As `Versions.message` is, of the SGLang that is installed in this environment or of another engine."""
    if engine != "sglang":
        return 1
    from gyre.engines.sglang import STREAM_INTERVAL

    known = tuple(int(part) for part in metadata.version("sglang").split(".")[:3])
    return 1 if known >= TELLS_SPANS else 2 * STREAM_INTERVAL  # two may be sent as one


class VersionsWork(Work):
    """An actor that takes the weights of one model or the other, as if by an optimizer step."""

    def take(self, path: str) -> Row:
        from gyre.models.safetensors_folder import SafetensorsFolder

        began = self._now()
        self.actor.policy.load(SafetensorsFolder(Path(path)))
        self.stepped_at = self._now()
        self.actor._changed()
        return {"seconds": self._now() - began, "stepped_at": self.stepped_at}

    def differences(self, groups: list[Any]) -> list[Any]:
        """The absolute differences of each sample's log-probs from this model's, float32 `[t]`."""
        from gyre.workloads.megatron.steps.packing import Row as Sequence
        from gyre.workloads.megatron.steps.packing import pack

        policy = self.actor.policy
        rows = [
            Sequence(group.prompt_ids, sample.token_ids, {"engine": sample.logprobs})
            for group in groups
            for sample in group.samples
        ]
        passes = list(pack(rows, max_tokens=policy.settings.pass_tokens))
        found = policy.logprobs(passes, temperature=1.0)
        mine = np.concatenate([one.float().cpu().numpy() for one, _ in found])
        engine = np.concatenate([part.values["engine"].numpy() for part in passes])
        ends = np.cumsum([len(sample.token_ids) for group in groups for sample in group.samples])
        return np.split(np.abs(mine - engine).astype(np.float32), ends[:-1])


class LoadTrainer(Trainer):
    """Keeps an engine under load, and keeps its samples."""

    def __init__(self, endpoint: Callable[[], Any], shape: Shape) -> None:
        self.shape = shape
        self.groups: list[Any] = []
        self.out_of_order = 0
        """Samples whose runs do not cover them, or go back to an older version."""
        super().__init__(endpoint)

    def _groups(self, purpose: str, groups: list[Any]) -> None:
        with self._lock:
            for group in groups:
                if group.id not in self.came:
                    self.groups.append(group)
                    self.out_of_order += sum(not _in_order(sample) for sample in group.samples)
        super()._groups(purpose, groups)

    def keep_asking(self, groups: int) -> None:
        """Keep this many groups open until `no_more`."""
        stop = self._feeding = threading.Event()

        def work() -> None:
            number = 0
            while not stop.wait(0.02):
                for _ in range(groups - self.outstanding):
                    ask = Ask(self.shape.prompt_of(6_000_000 + number), self.shape.length(number))
                    self.ask([ask], self.shape.n)
                    number += 1

        self._feeder = threading.Thread(target=work, daemon=True)
        self._feeder.start()


def _in_order(sample: Any) -> bool:
    at, version = 0, -1
    for run in sample.versions:
        if run.start != at or run.end <= run.start or run.version <= version:
            return False
        at, version = run.end, run.version
    return bool(at == len(sample.token_ids))


@dataclass
class Versions:
    """`models[v % 2]` are the weights of version `v`. The plane's trainer is a `LoadTrainer`."""

    plane: Plane
    actor: ActorProcess
    models: tuple[Path, Path]
    published: Path
    instance: str
    exact: bool
    window_s: float
    message: int
    """Tokens of a sample that the engine sends at once, if it does not tell which version made which; else 1."""

    @property
    def trainer(self) -> LoadTrainer:
        found = self.plane.trainer
        assert isinstance(found, LoadTrainer)
        return found

    def publish(self, version: int, until: float) -> Row:
        """Publish a version under load; returns one row."""
        left = max(1.0, until - now())
        stepped = self.actor.call("take", left, path=str(self.models[version % 2]))["stepped_at"]
        told = self.actor.call(
            "publish",
            left,
            line="publish",
            version=version,
            way="arena",
            folder=str(self.published),
            endpoint=str(self.plane.endpoint),
        )
        self.trainer.client.publish(
            version, told["checksum"], Path(told["path"]), sources=told["sources"], model=told["model"]
        )
        published = now()
        row = self.plane.log.wait("WeightsLoaded", until, stepped, instance=self.instance, version=version)
        keys = ("fetch_s", "load_s", "pause_s", "how", "note", "fetched")
        return {
            "version": version,
            "size_bytes": told["size_bytes"],
            "export_s": round(told["export_s"], 4),
            "step_to_published_s": round(published - stepped, 4),
            "publish_to_served_s": round(row["at"] - published, 4),
            "step_to_served_s": round(row["at"] - stepped, 4),
            **{key: row[key] for key in keys if key in row},
            "stepped_at": stepped,
            "served_at": row["at"],
        }

    def run(self, versions: int, until: float, told: Callable[[Row], None]) -> list[Row]:
        """Publish versions one after another, with a window of undisturbed generation before and after each."""
        rows = []
        time.sleep(self.window_s)
        for version in range(1, versions + 1):
            row = self.publish(version, until)
            time.sleep(self.window_s)
            first, last = row.pop("stepped_at"), row.pop("served_at")
            row["tokens_s_before"] = round(self.plane.rate(first - self.window_s, first), 1)
            row["tokens_s_after"] = round(self.plane.rate(last, last + self.window_s), 1)
            rows.append(row)
            told(row)
        return rows

    def checked(self, until: float) -> Row:
        """Check the samples against the models; see the module. The engine must have ended all requests."""
        groups = list(self.trainer.groups)
        found: Row = {
            "samples": sum(len(group.samples) for group in groups),
            "tokens_by_version": dict(sorted(self.trainer.versions.items())),
            "samples_of_several_versions": self.trainer.mixed,
            "runs_out_of_order": self.trainer.out_of_order,
        }
        limit = APART_EXACT if self.exact else APART
        mixed = [_some(groups, model, runs=2) for model in (0, 1)]
        apart: list[list[Any]] = []
        """`[model of the weights][sample]`, of both kinds of `mixed` in their order."""
        for model in (0, 1):
            self._take(model, until)
            apart.append(self._differences([*mixed[0], *mixed[1]], until) if any(mixed) else [])
            row = found[f"model_{model}"] = {"clean": self._clean(_some(groups, model, runs=1), limit, until)}
            others = row["clean"].pop("others", [])
            if others:
                self._take(1 - model, until)
                far = self._differences(others, until)
                row["clean"]["first_token_is_of_version_before"] = sum(bool(one[0] <= limit) for one in far)
        first = len(mixed[0])
        for model, mine in ((0, slice(0, first)), (1, slice(first, None))):
            row, samples = found[f"model_{model}"], [group.samples[0] for group in mixed[model]]
            row["mixed"] = _boundaries(samples, apart[model][mine], limit, self.message) if samples else {}
            found.setdefault("made_by", {})[f"model_{model}"] = [
                {
                    "runs": [[run.version, run.start, run.end] for run in sample.versions],
                    "nearer_to": "".join(map(str, (zero > one).astype(int))),
                }
                for sample, zero, one in zip(samples, apart[0][mine], apart[1][mine], strict=True)
            ]
        return found

    def _clean(self, groups: list[Any], limit: float, until: float) -> Row:
        """The check of samples of one version. `others` counts samples that the other model influenced."""
        if not groups:
            return {}
        others, own = [], []
        for group, far in zip(groups, self._differences(groups, until), strict=True):
            (others if (far > limit).any() else own).append(group)
        row: Row = {"samples": len(groups), "of_another_version_too": len(others), "others": others}
        if own:
            row |= self.actor.call("logprobs", max(1.0, until - now()), groups=own)
            tolerances = EXACT if self.exact else TOLERANCES
            row["within_tolerance"] = all(row[key] <= most for key, most in tolerances.items())
        return row

    def _take(self, model: int, until: float) -> None:
        self.actor.call("take", max(1.0, until - now()), path=str(self.models[model]))

    def _differences(self, groups: list[Any], until: float) -> list[Any]:
        found: list[Any] = self.actor.call("differences", max(1.0, until - now()), groups=groups)
        return found


def _some(groups: Sequence[Any], model: int, *, runs: int) -> list[Any]:
    """Samples that begin with a version of `model`, each as a group, with one run or at least two, spread evenly over
    the whole time."""
    from gyre.rollouts.samples import Group

    kept = [
        (group, sample)
        for group in groups
        for sample in group.samples
        if sample.versions and sample.versions[0].version % 2 == model
        if (len(sample.versions) == 1 if runs == 1 else len(sample.versions) >= runs)
    ]
    every = max(1, len(kept) // CHECKED)
    return [
        Group(number, group.prompt_ids, samples=[sample])
        for number, (group, sample) in enumerate(kept[::every][:CHECKED])
    ]


def _boundaries(samples: Sequence[Any], apart: Sequence[Any], limit: float, message: int) -> Row:
    """Where the log-probs leave the first version, compared with the recorded boundary. A token of the new weights may
    have the old ones' log-prob by chance, so that they seem to begin after the boundary, but not before it."""
    begins: Counter[str] = Counter()
    wrong = 0
    before: list[float] = []
    after: list[float] = []
    for sample, far in zip(samples, apart, strict=True):
        end = sample.versions[0].end
        beyond = np.flatnonzero(far > limit)
        late = int(beyond[0]) - end if len(beyond) else len(far)
        wrong += late <= -message
        if late == 0:
            begins["at the boundary"] += 1
        elif late < 0:
            begins[f"{-late} tokens before"] += 1
        else:
            begins[f"{late} tokens after" if late < 4 else "later or never"] += 1
        before.append(float(far[: end + min(late, 0)].mean()) if end + min(late, 0) else 0.0)
        after.append(float(far[end:].mean()))
    return {
        "samples": len(samples),
        "mixtures": wrong,
        "new_weights_begin": dict(sorted(begins.items())),
        "mean_abs_before": round(float(np.mean(before)), 5),
        "mean_abs_after": round(float(np.mean(after)), 5),
    }


async def ranks_hold(url: str, key: str, folder: Path, served: Path, version: str, within_s: float) -> Row:
    """The engine's own checksums of its ranks' memory after Gyre's loader and after it has read the same folder."""
    import asyncio

    from gyre.engines.http_client import EngineClient
    from gyre.engines.weight_loading import EngineLoader

    async with asyncio.timeout(within_s), EngineClient(url, api_key=API_KEY) as client:
        loader = EngineLoader(client, served, key=key)
        await loader.arm()
        report = await loader.load(version, folder)
        loaded = [rank["checksums"] for rank in await client.weights_checksum()]
        await client.update_weights_from_disk(folder, version, flush_cache=False)
        read = [rank["checksums"] for rank in await client.weights_checksum()]
    return {
        "how": report.how,
        "ranks": len(loaded),
        "tensors": [len(one) for one in loaded],
        "as_read_from_disk": loaded == read,
        "each_has_its_part": all(one != loaded[0] for one in loaded[1:]),
    }


def table(part: Row) -> list[str]:
    lines = []
    for row in part.get("versions", []):
        keys = ("version", "how", "fetch_s", "load_s", "pause_s", "step_to_served_s")
        told = {key: row[key] for key in (*keys, "tokens_s_before", "tokens_s_after") if key in row}
        lines.append(f"tp2.version {told}")
    for way in ("device", "pinned", "host", "disk"):
        for row in part.get("loading", {}).get(way, []):
            told = {key: row[key] for key in ("how", "prepare_s", "load_s", "pause_s", "why_disk")}
            lines.append(f"tp2.loading.{way}: {told}")
    keys = ("ranks", "engine_start_s", "medians", "rate_tokens_s", "ranks_hold", "ranks_hold_failed")
    lines += [f"tp2.{key} = {part[key]}" for key in (*keys, "account", "account_exact") if key in part]
    for key, value in part.get("checked", {}).items():
        if (
            key == "made_by"
        ):  # of each token, by which of the two models' weights; a look at the data is for that
            continue
        lines.append(f"tp2.checked.{key} = {value}")
    return lines
