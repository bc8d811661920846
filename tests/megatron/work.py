"""What rank processes do in the tests, and the groups that they do it to. Nothing here imports Megatron by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import WorkloadContext
from tests.memory_work import saved_bytes

VOCAB = 17
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
    "optim": {"lr": 1e-3},
    "critic": {"optim": {"lr": 1e-3}},
    "warm_start": {"max_steps": 4, "batch": 16, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
    "collective_timeout_s": 60.0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2-sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "dp2-whole": (2, {"distributed_optimizer": False}),
    "tp2-dp2": (4, {"tensor_parallel": 2}),
    "tp2-pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "pp2-dp2": (4, {"pipeline_parallel": 2}),
    "tp2-memory": (2, {"tensor_parallel": 2, "memory_checkpoint_share": 1.0}),
    "dp2-whole-memory": (2, {"distributed_optimizer": False, "memory_checkpoint_share": 1.0}),
    "recompute": (2, {"pipeline_parallel": 2, "recompute": True}),
}
"""By name: how many ranks, and what `config.megatron` says."""


def config_of(layout: str, **changes: Any) -> dict[str, Any]:
    """`pass_tokens` is so small that a micro-batch takes several passes, and its longest rows one each."""
    return {**CONFIG, "megatron": {"pass_tokens": 40, **LAYOUTS[layout][1]}, **changes}


def random_groups(
    start: int, count: int, *, seed: int = 0, n: int = 4, prompt_tokens: int | None = None
) -> list[Group]:
    """Scored groups of samples of very different lengths, with the log-probs of an engine and of a reference. Prompts
    have 2 to 11 tokens, or so many as are asked for."""
    draw = np.random.default_rng([seed, start])
    groups = []
    for index in range(start, start + count):
        samples = []
        for k in range(n):
            length = int(draw.integers(1, 13))
            samples.append(
                Sample(
                    token_ids=draw.integers(0, VOCAB, length).astype(np.int32),
                    logprobs=(-2.8 + 0.3 * draw.standard_normal(length)).astype(np.float32),
                    versions=(VersionRun(0, 0, length),),
                    reward=float((k + index) % 3 == 0),
                    extras={"ref_logprobs": (-2.8 + 0.3 * draw.standard_normal(length)).astype(np.float32)},
                )
            )
        length = int(draw.integers(2, 12)) if prompt_tokens is None else prompt_tokens
        prompt = draw.integers(0, VOCAB, length).astype(np.int32)
        groups.append(Group(id=index, prompt_ids=prompt, samples=samples))
    return groups


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.id for group in groups]


Steps = list[list[list[Group]]]
"""Steps of micro-batches of groups, before they are dealt out to ranks."""


@contextmanager
def actor_on(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    directory: Path = Path(),
    *,
    incarnation: int = 1,
) -> Iterator[Any]:
    from gyre.workloads.megatron.actor import MegatronActor

    actor = MegatronActor()
    actor.context = WorkloadContext(
        "j",
        "actor",
        rank,
        ranks,
        incarnation=incarnation,
        config=config,
        directory=directory,
        master_addr="127.0.0.1",
        master_port=port,
    )
    try:
        actor.setup()
        yield actor
    finally:
        if hasattr(actor, "backend"):
            actor.teardown()


def take_step(actor: Any, micro_batches: list[list[Group]]) -> dict[str, Any]:
    """One optimizer step, the groups dealt out as the trainer deals them."""
    step = actor.step + 1
    actor.begin(step)
    for index, groups in enumerate(micro_batches):
        actor.accumulate(groups[actor.rank :: actor.world_size], step=step, index=index)
    everything = [group.id for groups in micro_batches for group in groups]
    return compared(actor.apply(step=step, indices=len(micro_batches), group_ids=everything))


def compared(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the operations, which are fewer where passes have prompts once."""
    return {name: value for name, value in metrics.items() if name != "model_flops"}


def named_weights(actor: Any) -> dict[str, Any] | None:
    """By Hugging Face's names, on the first rank; as float32, which holds every bfloat16."""
    if actor.rank != 0:
        return None
    return {name: tensor.float().numpy().copy() for name, tensor in actor.weights().items()}


def train(rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps) -> dict[str, Any]:
    with actor_on(rank, ranks, port, config) as actor:
        actor.warm_start()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps]
        own = actor.step_logprobs(step=actor.step)
        return {"metrics": metrics, "state": actor.state(), "weights": named_weights(actor), "own": own}


def train_noting_nodes(
    rank: int, ranks: int, port: int, config: dict[str, Any], micro_batches: list[list[Group]]
) -> dict[str, Any]:
    """A step's metrics, log-probs and weights, and the most nodes of a pass whose nodes have parents."""
    with actor_on(rank, ranks, port, config) as actor:
        backward, nodes = actor.backend.policy.backward, [0]

        def noted(passes: list[Any], *args: Any, **kwargs: Any) -> Any:
            nodes.extend(len(one.parents) for one in passes)
            return backward(passes, *args, **kwargs)

        actor.backend.policy.backward = noted
        metrics = take_step(actor, micro_batches)
        own = actor.step_logprobs(step=1)["logprobs"]
        told = {"metrics": [metrics], "nodes": max(nodes), "digest": actor.state()["digest"], "own": own}
        return {**told, "weights": named_weights(actor) or {}}


def threads(rank: int, ranks: int, port: int) -> int:
    """How many threads this process has; each Gloo group of a rank is several."""
    return len(list(Path("/proc/self/task").iterdir()))


def check_vocab_parallel(rank: int, ranks: int, port: int, seed: int) -> None:
    """Log-probs, entropies and gradients of split logits against torch's, in float64 and in float32."""
    import torch
    import torch.distributed as dist

    from gyre.workloads.megatron.steps.logprobs import vocab_parallel_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        generator = torch.Generator().manual_seed(seed)
        tokens, vocab, padded, temperature = 9, 13, 16, 0.7
        whole = torch.randn(tokens, padded, generator=generator) * 4
        rows = torch.tensor([1, 2, 3, 5, 8])
        targets = torch.tensor([0, 12, 7, 8, 3])
        weights = torch.randn(2, len(rows), generator=generator)

        plain = whole.double().requires_grad_()
        every = torch.log_softmax(plain[rows, :vocab] / temperature, dim=-1)
        logprobs = every.gather(1, targets[:, None])[:, 0]
        entropies = -(every.exp() * every).sum(dim=-1)
        columns = slice(rank * padded // ranks, (rank + 1) * padded // ranks)
        for entropy_gradient in (False, True):
            mine = whole[:, columns].clone().requires_grad_()
            before = mine.detach().clone()
            found, found_entropies = vocab_parallel_logprobs(
                mine,
                targets,
                vocab=vocab,
                temperature=temperature,
                group=dist.group.WORLD,
                rows=rows,
                entropy_gradient=entropy_gradient,
            )
            torch.testing.assert_close(found.double(), logprobs, atol=2e-6, rtol=0)
            torch.testing.assert_close(found_entropies.double(), entropies, atol=2e-6, rtol=0)
            loss = (weights[0] * logprobs).sum()
            ours = (weights[0] * found).sum()
            if entropy_gradient:
                loss, ours = (
                    loss + (weights[1] * entropies).sum(),
                    ours + (weights[1] * found_entropies).sum(),
                )
            (expected,) = torch.autograd.grad(loss, plain, retain_graph=True)
            (gradient,) = torch.autograd.grad(ours, mine)
            torch.testing.assert_close(gradient.double(), expected[:, columns], atol=2e-6, rtol=0)
            assert torch.equal(mine.detach(), before), "the logits were written"
            assert found_entropies.requires_grad == entropy_gradient
    finally:
        dist.destroy_process_group()


def forward_and_back(
    rank: int, ranks: int, port: int, config: dict[str, Any], sequences: list[list[int]]
) -> dict[str, Any]:
    """A model from a folder: what it exports, and its log-probs of every token but the first of each sequence."""
    from gyre.workloads.learner.packing import TrainingRow, pack

    with actor_on(rank, ranks, port, config) as actor:
        rows = [
            TrainingRow(np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32))
            for tokens in sequences
        ]
        multiple = actor.backend.layout.tensor_parallel if actor.backend.layout.sequence_parallel else 1
        passes = list(pack(rows, max_tokens=actor.backend.layout.pass_tokens, multiple=multiple))
        found = actor.backend.policy.logprobs(passes, temperature=1.0)
        logprobs = [value.numpy() for pair in found for value in pair[:1]]
        return {
            "weights": named_weights(actor),
            "passes": len(passes),
            "logprobs": np.concatenate(logprobs) if logprobs else None,
        }


def write_folder(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    from tests.engines.embedded.tiny import write_checkpoint

    return write_checkpoint(folder, config, seed=seed, shards=2)


def refusal_of(rank: int, ranks: int, port: int, hugging_face: dict[str, Any]) -> str:
    """Why a model's configuration is refused at two by two ranks."""
    import torch

    from gyre.config.sections import MegatronSettings
    from gyre.errors import ConfigError
    from gyre.workloads.megatron.model.config import architecture_from, transformer_config

    settings = MegatronSettings(tensor_parallel=2, pipeline_parallel=2)
    try:
        architecture = architecture_from(hugging_face, "config.json")
        transformer_config(architecture, settings, device=torch.device("cpu"), dtype=torch.float32)
    except ConfigError as error:
        return str(error)
    return ""


def refused_setup(rank: int, ranks: int, port: int, config: dict[str, Any]) -> str:
    from gyre.errors import GyreError

    try:
        with actor_on(rank, ranks, port, config):
            return ""
    except GyreError as error:
        return str(error)


def save_folder(rank: int, ranks: int, port: int, config: dict[str, Any], folder: Path) -> None:
    with actor_on(rank, ranks, port, config) as actor:
        actor.save_model(folder)


def protocol(rank: int, ranks: int, port: int, config: dict[str, Any]) -> dict[str, Any]:
    """Calls that come again, too early, or with something wrong; what each was answered with."""
    from gyre.errors import GyreError

    def refusal(call: Any) -> str:
        try:
            call()
        except (GyreError, ValueError) as error:
            return getattr(error, "code", "") if isinstance(error, GyreError) else str(error)
        return "none"

    groups, others, told = random_groups(0, 4), random_groups(4, 4), {}
    with actor_on(rank, ranks, port, config) as actor:

        def accumulate(some: list[Group], step: int, index: int) -> Any:
            return actor.accumulate(some[rank::ranks], step=step, index=index)

        def digest() -> str:
            return str(actor.state()["digest"])

        start = digest()
        told["too early"] = [refusal(lambda: actor.begin(2)), refusal(lambda: accumulate(groups, 2, 0))]
        first = accumulate(groups, 1, 0)
        told["again"] = accumulate(groups, 1, 0) == first
        told["groups"] = first["groups"]
        told["twice in a step"] = refusal(lambda: accumulate(groups, 1, 1))
        told["other micro-batches"] = [
            refusal(lambda: actor.apply(step=1, indices=2, group_ids=ids(groups))),
            refusal(lambda: actor.apply(step=1, indices=1, group_ids=ids(groups)[:-1])),
        ]
        told["unchanged"] = digest() == start
        told["begun anew"] = actor.begin(1)
        unscored = random_groups(8, 4)
        for group in unscored:
            group.samples[0].reward = None
        told["unscored"] = refusal(lambda: accumulate(unscored, 1, 0))
        accumulate(groups, 1, 0)
        metrics = actor.apply(step=1, indices=1, group_ids=ids(groups))
        after = digest()
        told["changed"] = after != start
        told["applied again"] = [
            actor.apply(step=1, indices=1, group_ids=ids(groups)) == metrics,
            accumulate(groups, 1, 0) == actor.begin(1) == {"already_applied": True},
            digest() == after,
        ]
        told["trained twice"] = refusal(lambda: accumulate(groups, 2, 0))

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("a loss that fails half way")

        accumulate(others[:2], 2, 0)
        gradient = actor.backend.policy.backward
        actor.backend.policy.backward = broken
        told["half way"] = refusal(lambda: accumulate(others[2:], 2, 1))
        actor.backend.policy.backward = gradient
        told["spoiled"] = [
            refusal(lambda: accumulate(others[2:], 2, 1)),
            refusal(lambda: actor.apply(step=2, indices=1, group_ids=ids(others[:2]))),
        ]
        actor.begin(2)
        for sample in (sample for group in others for sample in group.samples):
            sample.logprobs[:] = float("nan")
        accumulate(others, 2, 0)
        told["not finite"] = refusal(lambda: actor.apply(step=2, indices=1, group_ids=ids(others)))
        told["still"] = digest() == after
        told["state"] = actor.state()
    return told


def train_as_float(rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """Weights before and after, on the first rank, as float32 whatever they are."""
    with actor_on(rank, ranks, port, config) as actor:
        start = {name: tensor.float().numpy().copy() for name, tensor in actor.weights().items()}
        for micro_batches in steps:
            take_step(actor, micro_batches)
        weights = {name: tensor.float().numpy().copy() for name, tensor in actor.weights().items()}
        return {"start": start, "weights": weights}


def reference_logprobs(
    rank: int, ranks: int, port: int, config: dict[str, Any], sequences: list[list[int]]
) -> Any:
    """Each sequence is a prompt of one token and a sample; one sample between them has no tokens."""
    from gyre.workloads.megatron.reference import MegatronReference

    def sample(tokens: list[int]) -> Sample:
        ids_ = np.array(tokens, np.int32)
        return Sample(ids_, np.zeros(len(ids_), np.float32), (VersionRun(0, 0, len(ids_)),))

    groups = [
        Group(at, np.array(tokens[:1], np.int32), samples=[sample([]), sample(tokens[1:])])
        for at, tokens in enumerate(sequences)
    ]
    reference = MegatronReference()
    reference.context = WorkloadContext("j", "reference", 3, 4, config=config)
    reference.setup()
    try:
        found = reference.logprobs(groups)
        assert not hasattr(reference.backend.policy, "optimizer")
        return np.concatenate([s.extras["ref_logprobs"] for group in found for s in group.samples])
    finally:
        reference.teardown()


def reference_of_groups(
    rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]
) -> tuple[Any, int]:
    """A reference's log-probs of all samples, and how many tokens went through it."""
    from gyre.workloads.megatron.reference import MegatronReference

    reference = MegatronReference()
    reference.context = WorkloadContext("j", "reference", 0, 1, config=config)
    reference.setup()
    try:
        widths, logprobs = [], reference.backend.policy.logprobs

        def noted(passes: Any, **kwargs: Any) -> Any:
            widths.extend(len(one.tokens) for one in passes)
            return logprobs(passes, **kwargs)

        reference.backend.policy.logprobs = noted  # type: ignore[method-assign]
        found = reference.logprobs(groups)
        said = [s.extras["ref_logprobs"] for group in found for s in group.samples]
        return np.concatenate(said), sum(widths)
    finally:
        reference.teardown()


def scores(rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]) -> list[float]:
    from gyre.workloads.megatron.reward_model import MegatronRewardModel

    model = MegatronRewardModel()
    model.context = WorkloadContext("j", "reward", 1, 2, config=config)
    model.setup()
    try:
        assert not hasattr(model.backend.policy, "optimizer")
        assert model.score([]) == []
        return [sample.reward for group in model.score(groups) for sample in group.samples]
    finally:
        model.teardown()


def refused_layout(rank: int, ranks: int, port: int, config: dict[str, Any]) -> list[str]:
    """Why an actor of this layout does not start; and why a second one does not, beside one that did."""
    from gyre.errors import ConfigError

    found = []
    try:
        with actor_on(rank, ranks, port, config), actor_on(rank, ranks, port, config):
            pass
    except ConfigError as error:
        found.append(str(error))
    return found


def take_a_copy(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    job: Path,
    told: dict[str, Any],
    sources: list[tuple[str, str]],
    sequences: list[list[int]],
) -> dict[str, Any]:
    """A gang that has trained a step takes the weights of `told` from `sources`, as the trainer has it done; its
    log-probs then, and what it trains from there."""
    import json

    from gyre.workloads.learner.packing import TrainingRow, pack

    with actor_on(rank, ranks, port, config, job) as actor:
        actor.copies_root = job / "memory"
        take_step(actor, [random_groups(50, 3)])
        first = list(actor.fetch_weights(**told, sources=sources)) if rank == 0 else None
        first = json.loads(actor.ranks.from_first(json.dumps(first)))
        actor.restore_weights(**told, sources=[tuple(first), *sources], trained=[[0, 4]])
        rows = [
            TrainingRow(np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32))
            for tokens in sequences
        ]
        found = actor.backend.policy.logprobs(list(pack(rows, max_tokens=200)), temperature=1.0)
        logprobs = [value.numpy() for pair in found for value in pair[:1]]
        return {
            "state": actor.state(),
            "logprobs": np.concatenate(logprobs) if logprobs else None,
            "weights": named_weights(actor),
            "metrics": take_step(actor, [random_groups(4, 3)]),
            "after": named_weights(actor),
        }


def refused_copy(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    job: Path,
    told: dict[str, Any],
    sources: list[tuple[str, str]],
) -> str:
    from gyre.weights.transfer.fetch import WeightsUnreachable

    with actor_on(rank, ranks, port, config, job) as actor:
        actor.copies_root = job / "memory"
        actor.copy_within_s = 0.5
        try:
            actor.fetch_weights(**told, sources=sources)
        except WeightsUnreachable as error:
            return str(error)
    return ""


def passes_of_a_step(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    micro_batches: list[list[Group]],
    halved: int = 0,
) -> dict[str, Any]:
    """The widths of the passes that each call makes, the last ones those of `apply`; how many tokens they predict; what
    `begin` said of them, and how many bytes autograd saved; and the step."""
    widths: list[list[int]] = []
    predicted = 0
    with actor_on(rank, ranks, port, config) as actor:
        backward = actor.backend.policy.backward

        def noted(passes: list[Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal predicted
            widths[-1] += [len(one.tokens) for one in passes]
            predicted += sum(len(one.targets) for one in passes)
            return backward(passes, *args, **kwargs)

        actor.backend.policy.backward = noted
        begun = actor.begin(1, halved)
        with saved_bytes() as saved:
            for index, groups in enumerate(micro_batches):
                widths.append([])
                actor.accumulate(groups[rank::ranks], step=1, index=index)
            widths.append([])
            everything = [group.id for groups in micro_batches for group in groups]
            metrics = actor.apply(step=1, indices=len(micro_batches), group_ids=everything)
        told = {"widths": widths, "metrics": compared(metrics), "predicted": predicted}
        told |= {"begun": begun, "saved": sum(saved)}
        return {**told, "weights": named_weights(actor)}


def a_gradient_that_is_not_finite(rank: int, ranks: int, port: int, config: dict[str, Any]) -> dict[str, Any]:
    """The optimizer finds a norm of NaN: how the step is refused, skipped, and what the next one is."""
    from gyre.workloads.learner.errors import NotFinite

    spoiled, groups = random_groups(0, 4), random_groups(4, 4)
    with actor_on(rank, ranks, port, config) as actor:
        before, optimizer = actor.state()["digest"], actor.backend.policy.optimizer
        norm, optimizer.get_grad_norm = optimizer.get_grad_norm, lambda: float("nan")
        told: dict[str, Any] = {"refused": ""}
        try:
            take_step(actor, [spoiled])
        except NotFinite as error:
            told["refused"] = error.code
        optimizer.get_grad_norm = norm
        told["skipped"] = actor.apply(step=1, indices=1, group_ids=ids(spoiled), skip=True)
        told["again"] = actor.apply(step=1, indices=0, group_ids=[])
        told["unchanged"] = actor.state()["digest"] == before
        told["next"] = take_step(actor, [groups])["step"]
        return told


def a_loss_that_raises_late(rank: int, ranks: int, port: int, config: dict[str, Any]) -> dict[str, Any]:
    """The first rank's loss raises in a pass that was put off until `apply`: what each rank is told, and the step that
    is then made again."""
    groups = random_groups(0, 4)
    with actor_on(rank, ranks, port, config) as actor:
        backward = actor.backend.policy.backward

        def broken(passes: list[Any], *args: Any, **kwargs: Any) -> Any:
            if passes and rank == 0:
                raise ValueError("a loss that does not like this sample")
            return backward(passes, *args, **kwargs)

        actor.backend.policy.backward = broken
        actor.begin(1)
        actor.accumulate(groups[rank::ranks], step=1, index=0)
        told = ""
        try:
            actor.apply(step=1, indices=1, group_ids=ids(groups))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        actor.backend.policy.backward = backward
        return {"told": told, "again": take_step(actor, [groups])["step"]}


def gradient_and_step(rank: int, ranks: int, port: int, config: dict[str, Any], groups: list[Group]) -> Any:
    """By parameter, as float32: the gradient of one micro-batch, and how the step changed it; and its metrics."""
    with actor_on(rank, ranks, port, config) as actor:
        policy = actor.backend.policy
        parameters = dict(policy.module.named_parameters())
        gradient: dict[str, Any] = {}
        step = policy.step

        def seen(**given: Any) -> float:
            gradient.update({name: _on_host(one.main_grad) for name, one in parameters.items()})
            return float(step(**given))

        policy.step = seen
        before = {name: _on_host(one) for name, one in parameters.items()}
        metrics = take_step(actor, [groups])
        change = {name: _on_host(one) - before[name] for name, one in parameters.items()}
        return gradient, change, metrics


def _on_host(tensor: Any) -> Any:
    return tensor.detach().float().cpu().numpy().copy()
