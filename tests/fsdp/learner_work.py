"""What rank processes do with FSDP2's learners, reference and reward model. Nothing here imports transformers by
itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import BaseWorkload, WorkloadContext
from tests.megatron.learner_work import flat_values, step_by, take_valued_step, values_of
from tests.megatron.work import Steps, take_step
from tests.memory_work import saved_bytes

CONFIG: dict[str, Any] = {
    "seed": 11,
    "model": {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "mlp": 48,
        "max_positions": 32,
        "tied_embeddings": False,
    },
    "task": {"digits": 2, "zero_padded": False},
    "sampling": {"n": 4, "max_new_tokens": 12, "temperature": 0.7},
    "optim": {"lr": 1e-2},
    "critic": {"optim": {"lr": 1e-2}},
    "warm_start": {"max_steps": 4, "batch": 16, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
    "fsdp": {"pass_tokens": 64},
    "collective_timeout_s": 60.0,
}
PPO: dict[str, Any] = {"loss": {"adv_estimator": "gae"}}


def of_folder(folder: Path, **sections: Any) -> dict[str, Any]:
    return {**CONFIG, "model_path": str(folder), **sections}


@contextmanager
def bound(
    name: str,
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    directory: Path = Path(),
    *,
    incarnation: int = 1,
) -> Iterator[Any]:
    """An object of the class, set up on this rank."""
    from gyre.workloads import fsdp

    workload: BaseWorkload = getattr(fsdp, name)()
    workload.context = WorkloadContext(
        "j",
        name.removeprefix("Fsdp").lower(),
        rank,
        ranks,
        incarnation=incarnation,
        config=config,
        directory=directory,
        master_addr="127.0.0.1",
        master_port=port,
    )
    try:
        workload.setup()
        yield workload
    finally:
        workload.teardown()


def check(rank: int, ranks: int, port: int, name: str, config: dict[str, Any], directory: Path) -> None:
    """Try a class's contract."""
    from gyre.testing import contracts
    from gyre.workloads import fsdp
    from gyre.workloads.torch.actor import TorchActor
    from tests.workloads.torch_workloads import bind

    if name == "actor":
        contracts.check_actor(fsdp.FsdpActor, config=config, directory=directory, publishes=True)
    elif name == "critic":
        policy = bind(TorchActor(), CONFIG).export_weights(version=0)
        contracts.check_critic(fsdp.FsdpCritic, config=config, directory=directory, policy=policy)
    elif name == "reference":
        contracts.check_reference(fsdp.FsdpReference, config=config)
    else:
        contracts.check_reward(fsdp.FsdpRewardModel, config=config)


def _steps_of(name: str, learner: Any, steps: Steps) -> list[dict[str, Any]]:
    make = take_valued_step if name == "FsdpCritic" else take_step
    return [make(learner, copy.deepcopy(micro_batches)) for micro_batches in steps]


def checkpoint_and_go_on(
    rank: int, ranks: int, port: int, name: str, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """A step, a checkpoint, and the other steps."""
    with bound(name, rank, ranks, port, config) as learner:
        first = _steps_of(name, learner, steps[:1])
        learner.checkpoint(folder)
        at = learner.state()
        metrics = _steps_of(name, learner, steps[1:])
        return {"first": first, "at": at, "metrics": metrics, "after": learner.state()}


def runs_out_of_memory(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    micro_batches: list[list[Group]],
    times: Sequence[int],
) -> dict[str, Any]:
    """One step of an actor, which is begun so often with passes made smaller so many `times`; all but the last time it
    has one micro-batch, and then no memory left. What it said, what autograd saved of its first micro-batch each time,
    and what came of it."""
    told: dict[str, Any] = {"begun": [], "saved": []}
    with bound("FsdpActor", rank, ranks, port, config) as actor:
        for smaller in times:
            told["begun"].append(actor.begin(1, smaller))
            with saved_bytes() as saved:
                actor.accumulate(micro_batches[0][rank::ranks], step=1, index=0)
            told["saved"].append(sum(saved))
        for index, groups in enumerate(micro_batches[1:], start=1):
            actor.accumulate(groups[rank::ranks], step=1, index=index)
        everything = [group.id for groups in micro_batches for group in groups]
        actor.apply(step=1, indices=len(micro_batches), group_ids=everything)
        return {**told, "digest": actor.state()["digest"], "passes": actor.health()["passes"]}


def restore_and_go_on(
    rank: int, ranks: int, port: int, name: str, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """Of another seed, which the checkpoint must replace, as another process would do it."""
    with bound(name, rank, ranks, port, {**config, "seed": 99}) as learner:
        learner.restore(folder)
        at = learner.state()
        learner.settings = learner.settings.model_copy(update={"seed": config["seed"]})
        return {"at": at, "metrics": _steps_of(name, learner, steps[1:]), "after": learner.state()}


def publishes(rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, out: Path) -> Any:
    """The folder that an actor writes after its steps, and what it exports; on the first rank."""
    with bound("FsdpActor", rank, ranks, port, config) as actor:
        warm = actor.warm_start()
        _steps_of("FsdpActor", actor, steps)
        if rank == 0:
            actor.save_model(out)
        described, manifest, _ = actor.export_model(version=1) if rank == 0 else ({}, {}, b"")
        return {
            "warm": warm,
            "config": described,
            "names": [one["name"] for one in manifest.get("tensors", [])],
        }


def from_pretrained(rank: int, ranks: int, port: int, folder: Path) -> dict[str, Any]:
    """What `from_pretrained` missed, or did not know, in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return {name: sorted(map(str, found)) for name, found in info.items() if found}


def conversations(vocab: int) -> list[Group]:
    """Samples of several lengths, one that says nothing, and one longer than a pass."""
    draw = np.random.default_rng(3)

    def sample(count: int) -> Sample:
        tokens = draw.integers(0, vocab, count).astype(np.int32)
        versions = (VersionRun(0, 0, count),) if count else ()
        return Sample(tokens, np.zeros(count, np.float32), versions)

    return [
        Group(
            at, draw.integers(0, vocab, 4 + at).astype(np.int32), samples=[sample(5), sample(0), sample(70)]
        )
        for at in range(2)
    ]


def reference_logprobs(
    rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]
) -> tuple[Any, Any]:
    """The reference's log-probs of all tokens, and those of transformers' own model."""
    import torch
    from transformers import AutoModelForCausalLM

    with bound("FsdpReference", rank, ranks, port, config) as reference:
        told = reference.logprobs(copy.deepcopy(groups))
    found = np.concatenate([sample.extras["ref_logprobs"] for group in told for sample in group.samples])
    model: Any = AutoModelForCausalLM.from_pretrained(config["model_path"], dtype=torch.float32).eval()
    wanted = []
    with torch.no_grad():
        for group in groups:
            for sample in group.samples:
                tokens = torch.from_numpy(
                    np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64)
                )
                logits = model(tokens[None]).logits[0] / config["sampling"]["temperature"]
                log_p = torch.log_softmax(logits.float(), dim=-1)[len(group.prompt_ids) - 1 : -1]
                wanted.append(log_p.gather(1, tokens[len(group.prompt_ids) :, None])[:, 0].numpy())
    return found, np.concatenate(wanted)


def trains_an_adapter(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, groups: list[Group], out: Path
) -> dict[str, Any]:
    """An actor with an adapter takes steps whose samples no reference has judged; then what it says of `groups`, with
    its adapter and as the reference, the version that it publishes, below `out`, and the model that it saves."""
    from safetensors.torch import save_file

    bare = copy.deepcopy(steps)
    for sample in (one for step in bare for micro in step for group in micro for one in group.samples):
        sample.extras.clear()
    with bound("FsdpActor", rank, ranks, port, config) as actor:
        metrics = _steps_of("FsdpActor", actor, bare)
        judged = [sample for group in actor.judged(copy.deepcopy(groups)) for sample in group.samples]
        told = {
            "metrics": metrics,
            "reference": [sample.extras.get("ref_logprobs") for sample in judged],
            "said": actor.by_group(groups),
        }
        if rank == 0:
            named, described = actor.servable()
            folder = out / "version"
            folder.mkdir(parents=True)
            save_file(named, folder / "model.safetensors")
            for name, content in actor.servable_files().items():
                (folder / name).write_bytes(content)
            told["config"] = described
            actor.save_model(out / "saved")
        return told


def said_by_folder(rank: int, ranks: int, port: int, folder: Path, groups: list[Group]) -> list[Any]:
    """What transformers' own model says of the samples, at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [one.numpy() for one in _said_of(model, groups)]


def said_by_engine(
    rank: int, ranks: int, port: int, base: Path, adapter: Path, groups: list[Group]
) -> list[Any]:
    """What the embedded engine's model says of them with the adapter in a folder."""
    import torch

    from gyre.engines.embedded.adapters import adapted
    from gyre.engines.embedded.model_choice import served_model
    from gyre.models.adapters import AdapterLimits

    served = served_model(base, AdapterLimits(config_rank(adapter)))
    model = served.load(base, torch.float32)
    with adapted(model, served.load_adapter(adapter, torch.float32)):
        return [one.numpy() for one in _said_of(model, groups)]


def config_rank(adapter: Path) -> int:
    from gyre.models.adapters import read_adapter_config

    return read_adapter_config(adapter).rank


def _said_of(model: Any, groups: list[Group]) -> list[Any]:
    import torch

    found = []
    with torch.no_grad():
        for group in groups:
            for sample in group.samples:
                tokens = torch.from_numpy(
                    np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64)
                )
                log_p = torch.log_softmax(model(tokens[None]).logits[0].float(), dim=-1)
                rows = log_p[len(group.prompt_ids) - 1 : -1]
                found.append(rows.gather(1, tokens[len(group.prompt_ids) :, None])[:, 0])
    return found


def save_reward_model(rank: int, ranks: int, port: int, kind: str, folder: Path, labels: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from tests.fsdp.work import _SMALL, MODELS

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **{**_SMALL, **MODELS[kind]}, num_labels=labels)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def scores(
    rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]
) -> tuple[list[float], list[float]]:
    """The reward model's, and those of transformers' own model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with bound("FsdpRewardModel", rank, ranks, port, config) as model:
        assert model.score([]) == []
        told = model.score(copy.deepcopy(groups))
    found = [sample.reward for group in told for sample in group.samples]
    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        config["reward_model"]["path"], num_labels=1, dtype=torch.float32
    ).eval()
    plain.config.pad_token_id = None
    wanted = []
    with torch.no_grad():
        for group in groups:
            for sample in group.samples:
                tokens = np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64)
                wanted.append(float(plain(torch.from_numpy(tokens)[None]).logits[0, 0]))
    return found, wanted


def refused(rank: int, ranks: int, port: int, name: str, config: dict[str, Any]) -> str:
    """Why the class is not set up."""
    from gyre.errors import GyreError

    try:
        with bound(name, rank, ranks, port, config):
            return ""
    except GyreError as error:
        return str(error)


def steps_by(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    losses: dict[str, dict[str, Any]],
    groups: dict[str, list[Group]],
) -> dict[str, Any]:
    """A step by each loss in turn: metrics and weights; and the most nodes that one goes on after, in any pass."""
    depth = 0

    def noted(passes: Sequence[Any], *args: Any) -> Any:
        nonlocal depth
        for part in passes:
            depths: list[int] = []
            for parent in part.parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            depth = max(depth, *depths, 0)
        return backward(passes, *args)

    with bound("FsdpActor", rank, ranks, port, config) as actor:
        backward, actor.backend.backward = actor.backend.backward, noted
        steps = [
            {
                "metrics": step_by(actor, loss, groups[name]),
                "weights": {key: one.float().numpy().copy() for key, one in actor.weights().items()},
            }
            for name, loss in losses.items()
        ]
        return {"steps": steps, "depth": depth}


def valued_step(
    rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]
) -> dict[str, Any]:
    """The values before a critic's step, and the metrics of the step."""
    with bound("FsdpCritic", rank, ranks, port, config) as critic:
        values = flat_values(values_of(critic, groups))
        return {"values": values, "metrics": take_valued_step(critic, [groups])}
