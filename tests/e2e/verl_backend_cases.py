"""What `test_verl_backend.py` runs in verl's environment, a process for each rank:

    python tests/e2e/verl_backend_cases.py CASE FOLDER RANK RANKS PORT

A case writes what it saw to FOLDER/CASE.json, on the first rank, or raises.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gyre_verl.backend.actor import VerlActor

from gyre.errors import GyreError
from gyre.models.modules import Decoder
from gyre.models.tensor_names import from_names, to_names
from gyre.rollouts.samples import Group
from gyre.testing import check_actor
from gyre.testing.contracts.example_groups import groups_of, ids_of
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.errors import CheckpointMismatch, MicroBatchMismatch, NotFinite
from gyre.workloads.learner.losses import policy_pass_loss, policy_rows
from gyre.workloads.learner.packing import pack
from gyre.workloads.learner.padded import TokenRow, pad_rows
from tests.workloads.padded_logprobs import token_logprobs

CONFIG: dict[str, Any] = {
    "task": {"digits": 2},
    "model": {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32},
    "warm_start": {"max_steps": 20, "batch": 16, "lr": 3e-3},
    "sampling": {"n": 4, "max_new_tokens": 6, "temperature": 0.7},
    "optim": {"lr": 1e-2, "weight_decay": 0.1},
    "loss": {"entropy_coeff": 0.01},
    "collective_timeout_s": 60.0,
    "verl": {"pass_tokens": 40},
}

Case = Callable[[Path, int, int, int], dict[str, Any]]


@contextmanager
def actor_of(
    rank: int, ranks: int, port: int, folder: Path, config: Mapping[str, Any] = CONFIG
) -> Iterator[VerlActor]:
    actor = VerlActor()
    actor.context = WorkloadContext(
        job="cases",
        job_id="cases-1",
        role="actor",
        rank=rank,
        world_size=ranks,
        config=dict(config),
        directory=folder,
        master_addr="127.0.0.1",
        master_port=port,
    )
    actor.setup()
    try:
        yield actor
    finally:
        actor.teardown()


def shares(groups: list[Group], rank: int, ranks: int) -> list[list[Group]]:
    """Micro-batches of a rank, unequal on two ranks: of the first micro-batch the second rank has nothing, and of the
    second one it has one group."""
    if ranks == 1:
        return [groups[:3], groups[3:]]
    return [groups[:3], groups[3:5]] if rank == 0 else [[], groups[5:]]


def take_step(actor: VerlActor, step: int, rank: int, ranks: int) -> dict[str, Any]:
    groups = groups_of(CONFIG)((step - 1) * 6, 6)
    actor.begin(step)
    for index, share in enumerate(shares(groups, rank, ranks)):
        actor.accumulate(share, step=step, index=index)
    applied: dict[str, Any] = actor.apply(step=step, indices=2, group_ids=ids_of(groups))
    return applied


def whole_gradient(actor: VerlActor) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.full_tensor().clone()
        for name, parameter in actor.backend._module.named_parameters()
    }


def plain_gradient(actor: VerlActor, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of step 1, in plain torch: Gyre's own decoder, one sequence after the other."""
    small = actor.trained_model.small
    assert small is not None
    model = Decoder(small)
    model.load_state_dict({name: value.clone() for name, value in from_names(named, small).items()})
    rows = policy_rows(groups_of(CONFIG)(0, 6), actor.settings)
    for row in rows:
        batch = pad_rows([TokenRow(row.prompt_ids, row.token_ids)])
        logprobs, entropies = token_logprobs(
            model, batch, actor.settings.sampling.temperature, entropy_gradient=True
        )
        (part,) = pack([row], max_tokens=1 << 20)
        policy_pass_loss(part, logprobs[0], entropies[0], actor.settings).loss.backward()
    return to_names({name: parameter.grad for name, parameter in model.named_parameters()}, small)


def gradient(folder: Path, rank: int, ranks: int, port: int, **own: Any) -> dict[str, Any]:
    """How far a step's gradient is from plain torch's, as a part of its size: of all numbers, and of the worst
    tensor."""
    config = {**CONFIG, "verl": {**CONFIG["verl"], **own}}
    with actor_of(rank, ranks, port, folder, config) as actor:
        before = {name: value.clone() for name, value in actor.weights().items()}
        found: dict[str, torch.Tensor] = {}
        update = actor.backend.update

        def look(*, count: float, lr: float) -> float:
            found.update(whole_gradient(actor))
            return update(count=count, lr=lr)

        actor.backend.update = look  # type: ignore[method-assign]
        take_step(actor, 1, rank, ranks)
        if rank:
            return {}
        wanted = plain_gradient(actor, before)
        assert set(found) == set(wanted)
        worst = {name: float((found[name] - one).norm() / one.norm()) for name, one in wanted.items()}
        off = math.sqrt(sum(float((found[name] - one).square().sum()) for name, one in wanted.items()))
        size = math.sqrt(sum(float(one.square().sum()) for one in wanted.values()))
        return {"relative": off / size, "worst": max(worst.values()), "tensors": len(worst)}


def padded_gradient(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    return gradient(folder, rank, ranks, port, use_remove_padding=False)


def state_of(actor: VerlActor) -> dict[str, Any]:
    """The digest of the weights, and one of the weights and the optimizer's moments, from whole tensors."""
    whole = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in actor.backend._state().items()
    }
    return {
        "digest": actor.state()["digest"],
        "all": checksum_of_weights(whole),
        "updates": actor.backend._updates,
    }


def written(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Two steps, a checkpoint that is written twice, and a third step."""
    with actor_of(rank, ranks, port, folder) as actor:
        actor.warm_start()
        for step in (1, 2):
            take_step(actor, step, rank, ranks)
        at = state_of(actor)
        for _ in range(2):
            actor.checkpoint(folder / "two-ranks")
        assert state_of(actor) == at
        third = take_step(actor, 3, rank, ranks)
        actor.restore(folder / "two-ranks")
        again = take_step(actor, 3, rank, ranks)
        assert again == third, "a restored step is not the step"
        return at | {"third": third["grad_norm"]}


def loaded(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """What two ranks wrote, on one; then damaged copies of it, which change nothing."""
    with actor_of(rank, ranks, port, folder) as actor:
        first = state_of(actor)
        problems = {}
        for name in ("damaged", "no-record", "lacks-a-file", "of-others", "nothing"):
            problems[name] = refused(lambda name=name: actor.restore(folder / name), CheckpointMismatch)
        assert state_of(actor) == first, "what was refused changed something"
        actor.restore(folder / "two-ranks")
        at = state_of(actor)
        return at | {"problems": problems, "third": take_step(actor, 3, rank, ranks)["grad_norm"]}


def of_others(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """A checkpoint of a smaller model."""
    smaller = {**CONFIG, "model": {**CONFIG["model"], "layers": 1}}
    with actor_of(rank, ranks, port, folder, smaller) as actor:
        actor.checkpoint(folder / "of-others")
    return {}


def loss_fails(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """A loss that raises on one rank, in the middle of a step: all ranks hear of it, `apply` is refused, and the step
    made anew is the step."""
    with actor_of(rank, ranks, port, folder) as actor:
        wanted = take_step(actor, 1, rank, ranks)
    with actor_of(rank, ranks, port + 1, folder) as actor:
        groups = groups_of(CONFIG)(0, 6)
        actor.begin(1)
        first, second = shares(groups, rank, ranks)
        actor.accumulate(first, step=1, index=0)
        loss, actor.loss = actor.loss, fails if rank == 1 else actor.loss  # type: ignore[method-assign]

        def finish() -> None:
            """Small passes are put off to the end of the step, so it may fail there."""
            actor.accumulate(second, step=1, index=1)
            actor.apply(step=1, indices=2, group_ids=ids_of(groups))

        before = actor.state()
        told = refused(finish, Exception)
        actor.loss = loss  # type: ignore[method-assign]
        again = refused(lambda: actor.apply(step=1, indices=2, group_ids=ids_of(groups)), MicroBatchMismatch)
        assert actor.state() == before
        assert take_step(actor, 1, rank, ranks) == wanted, "a step that is made anew is another one"
        return {"told": told, "again": again}


def fails(*_: Any) -> Any:
    raise ArithmeticError("a user's own")


def not_finite(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """A gradient that is not finite changes nothing."""
    with actor_of(rank, ranks, port, folder) as actor:
        loss = actor.loss

        def infinite(*given: Any) -> Any:
            found = loss(*given)
            return type(found)(found.loss * float("inf"), found.weight, found.metrics)

        actor.loss = infinite if rank == ranks - 1 else loss  # type: ignore[method-assign]
        before = state_of(actor)
        told = refused(lambda: take_step(actor, 1, rank, ranks), NotFinite)
        assert state_of(actor) == before
        actor.loss = loss  # type: ignore[method-assign]
        take_step(actor, 1, rank, ranks)
        return {"told": told}


def contract(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    check_actor(VerlActor, config=CONFIG, directory=folder / "contract", publishes=True)
    return {}


def bad_input(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """What each bad job is told; FOLDER/bad.json has the jobs' `config`, by name."""
    told = {}
    for name, config in json.loads((folder / "bad.json").read_text()).items():

        def begin(config: dict[str, Any] = config) -> None:
            with actor_of(rank, ranks, port, folder, {**CONFIG, **config}):
                """It is refused before."""

        told[name] = refused(begin, GyreError)
    return told


def refused(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


CASES: dict[str, Case] = {
    one.__name__: one
    for one in (
        gradient,
        padded_gradient,
        written,
        loaded,
        of_others,
        loss_fails,
        not_finite,
        contract,
        bad_input,
    )
}


def main() -> None:
    case, folder, rank, ranks, port = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    torch.set_num_threads(1)
    found = CASES[case](folder, rank, ranks, port)
    if rank == 0:
        (folder / f"{case}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads may abort a process that ends in order


if __name__ == "__main__":
    main()
