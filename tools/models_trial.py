"""One kind of model of transformers, tiny and drawn, through what Gyre does with it, beside transformers itself.

The reference is a plain loop over `from_pretrained`: each sequence alone, all logits, autograd, no cache. It uses
nothing of the product's code. The folder's windows and chunks are of a few tokens, and sequences are longer than each.

Where transformers says otherwise of a sequence's beginning when more follows, it is no reference beyond there, which
the row says.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gyre.config.sections import WorkloadSettings
from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.engine_requests import EngineRequest
from gyre.engines.embedded.token_sampling import Sampling
from gyre.engines.embedded.transformers_model import TransformersModel
from gyre.errors import GyreError
from gyre.models.architecture import FAMILIES
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.small_config import VOCAB, small_configs
from gyre.models.transformers_models import refuse_not_causal
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.fsdp.backend import FsdpBackend
from gyre.workloads.fsdp.conversion import export_checkpoint
from gyre.workloads.learner.packing import TrainingRow, pack
from gyre.workloads.megatron.reference import MegatronReference
from gyre.workloads.torch.reference import TorchReference

RANKS = 2
SEQUENCES = ((10, 81), (5, 20), (12, 60), (3, 6), (7, 33))
"""Tokens of the prompts and of the answers: the longest is several times each number of tokens of the small folders."""
GROUPS = ((30, (25, 1, 9)), (4, (20, 3)))
"""Tokens of prompts that several answers have, and of these answers."""
PROMPTS, NEW = (30, 5, 70), 16
"""Tokens of the prompts that the engine gets, and of its answers."""
LOGPROB, GRADIENT, ONE_GRADIENT = 2e-3, 1e-3, 2e-2
"""What float32 may round: the largest difference of a log-prob, and those of the gradient and of one parameter's as
parts of their norms."""
_BFLOAT16 = 3.0
"""By how much more than transformers itself the product may be off in bfloat16."""
_BFLOAT16_TOKENS = 240
"""Of its passes: positions that are added to scores are rounded to 8 bits, and a wider pass has larger ones."""
_TEMPERATURE = 0.7
_ANSWER_S = 100.0
_OTHERS = ("gloo", "without an answer", "another rank")
"""What a rank says when another one has failed."""

_NOT_IN_DEFAULTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "use_sliding_window": True,
    "attn_temperature_tuning": True,
}
"""What families have no default for, or are tried with: a window and a tuning are on."""
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}


class Failed(Exception):
    """A step of the trial went wrong; its text is for the table."""


def trial(kind: str, room: Path) -> dict[str, Any]:
    """The row of a kind of model: see `docs/models.md`. Files go to the folder `room`."""
    row: dict[str, Any] = {}
    folder = room / "model"
    try:
        row |= _make(kind, folder)
    except Exception as error:  # the family's own classes raise anything
        # Where the family's defaults are no model, or one of images, nothing is known of a folder's: `plan` tries it.
        made = isinstance(error, Failed)
        return {"made": made, "fsdp": _refused(_text(error)), "embedded": _refused(_text(error))}
    row["made"] = True
    row["reference"] = reference = _drift(folder)
    row["fsdp"] = _judged(lambda: _by_fsdp(folder, room))
    if kind in FAMILIES:  # those have no windows
        plain = room / "plain"
        _make(kind, plain, added=False)
        row["torch"] = _judged(lambda: _by_role(TorchReference, plain, room))
        row["megatron"] = _judged(lambda: _by_role(MegatronReference, plain, room))
    row["embedded"] = _refused(reference) if reference else _judged(lambda: _by_engine(folder))
    return row


def _refused(reason: str) -> dict[str, Any]:
    return {"takes": False, "reason": reason}


def _judged(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"takes": True, "reason": ""} | what()
    except Exception as error:  # whatever hinders is the row's reason
        return _refused(_text(error))


def _text(error: BaseException) -> str:
    said = " ".join(str(error).split())
    known = isinstance(error, Failed | GyreError)
    return (said if known else f"{type(error).__name__}: {said}")[:300]


# The folder


def _make(kind: str, folder: Path, *, added: bool = True) -> dict[str, Any]:
    """Write a tiny model, unless `added` is false with what is off by default. Raises what hinders."""
    refuse_not_causal({"model_type": kind}, "config.json")
    defaults = CONFIG_MAPPING[kind]().to_dict()
    whole = {
        key: one for key, one in defaults.items() if key.endswith("_config") or key == "is_encoder_decoder"
    }
    refuse_not_causal({"model_type": kind} | whole, "config.json")
    problems: list[Exception] = []
    for needs in ({}, {"is_decoder": True}) if "is_decoder" in defaults else ({},):
        for told in _candidates(kind, defaults | needs, added=added):
            try:
                model = _built(kind, told)
                break
            except Exception as error:  # the family's own classes raise anything
                problems.append(error)
        else:
            raise problems[0]
        if not _looks_ahead(model):
            model.save_pretrained(folder)
            return {"class": type(model).__name__, "needs": needs}
    raise Failed(
        f"{type(model).__name__} of transformers looks ahead: what it says of a token depends on those after it"
    )


def _candidates(kind: str, defaults: dict[str, Any], *, added: bool) -> Iterator[dict[str, Any]]:
    more = {key: one for key, one in _NOT_IN_DEFAULTS.items() if key in defaults and not defaults[key]}
    for told in (
        defaults | (more if added else {}) | _OWN.get(kind, {}),
        defaults | _OWN.get(kind, {}),
        defaults,
    ):
        yield from small_configs(told)


def _built(kind: str, told: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind].from_dict(dict(told)), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape)
            if parameter.ndim < 2:
                parameter.add_(drawn, alpha=0.1)
            else:
                parameter.copy_(1.2 * drawn / parameter.shape[-1] ** 0.5)
        logits = model(input_ids=_drawn(90, 1)[None], use_cache=False).logits
    if not bool(logits.isfinite().all()):
        raise Failed("transformers gives logits that are not finite")
    return model


def _looks_ahead(model: Any) -> bool:
    tokens = _drawn(7, 2)[None]
    with torch.no_grad():
        whole, part = (model(input_ids=tokens[:, :end], use_cache=False).logits[0, :5] for end in (7, 5))
    return float((whole - part).abs().max()) > LOGPROB


def _drawn(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, count))


# transformers


def _opened(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _rows() -> list[tuple[list[int], list[int], list[float]]]:
    draw = np.random.default_rng(1)
    drawn = [(draw.integers(3, VOCAB, prompt).tolist(), answer) for prompt, answer in SEQUENCES]
    for prompt_tokens, answers in GROUPS:
        prompt = draw.integers(3, VOCAB, prompt_tokens).tolist()
        drawn += [(prompt, answer) for answer in answers]
    return [
        (prompt, draw.integers(3, VOCAB, answer).tolist(), draw.standard_normal(answer).tolist())
        for prompt, answer in drawn
    ]


def _of_rank(rank: int, ranks: int) -> list[int]:
    """The numbers of its rows; all of a group are one rank's."""
    owners = [at % ranks for at in range(len(SEQUENCES))]
    for at, (_, answers) in enumerate(GROUPS):
        owners += [at % ranks] * len(answers)
    return [number for number, owner in enumerate(owners) if owner == rank]


def _logprobs(
    model: Any, prompt: list[int], answer: list[int], temperature: float = _TEMPERATURE
) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits
    return torch.log_softmax(logits[0, len(prompt) - 1 : -1].float() / temperature, -1)


def _plain(model: Any, *, gradient: bool = True) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Log-probs of each answer, and gradients of the loss over them."""
    said = []
    with torch.set_grad_enabled(gradient):
        for prompt, answer, advantages in _rows():
            every = _logprobs(model, prompt, answer)
            mine = every.gather(1, torch.tensor(answer)[:, None])[:, 0]
            entropies = -(every.exp() * every).sum(-1)
            if gradient:
                (torch.tensor(advantages) * mine + 0.1 * mine.square() - 0.3 * entropies).sum().backward()
            said.append(mine.detach().numpy())
    return said, {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


def _drift(folder: Path) -> str:
    """Why transformers is no reference for long sequences; "" where it is."""
    model, tokens = _opened(folder), _drawn(90, 4)[None]
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits[0, :60].log_softmax(-1)
        part = model(input_ids=tokens[:, :60], use_cache=False).logits[0].log_softmax(-1)
    drift = float((whole - part).abs().max())
    return "" if drift < LOGPROB else f"transformers says otherwise of a prefix, by {drift:.1g}"


# FSDP2


def _by_fsdp(folder: Path, room: Path) -> dict[str, Any]:
    said, gradients = _plain(_opened(folder))
    port = _free_port()
    told = _in_forks(
        [lambda rank=rank: _rank(rank, RANKS, port, folder, room / "checkpoint") for rank in range(RANKS)]
    )
    wanted = [np.concatenate([said[at] for at in _of_rank(rank, RANKS)]) for rank in range(RANKS)]
    found: dict[str, Any] = {"way": told[0]["way"], "once": told[0]["once"], "said": told[0]["packing"]}
    for what in ("packed", "alone"):
        found[what] = max(_most(one[what], w) for one, w in zip(told, wanted, strict=True))
        if not found[what] < LOGPROB:
            raise Failed(f"log-probs of sequences {what} differ from transformers' by {found[what]:.2g}")
    found |= _gradient_differences(told[0]["gradients"], gradients)
    port = _free_port()
    exported = room / "exported"
    _in_forks([lambda: export_checkpoint(room / "checkpoint", exported)])
    after, _ = _plain(_opened(exported), gradient=False)
    found["export"] = max(
        _most(one["after"], np.concatenate([after[at] for at in _of_rank(rank, RANKS)]))
        for rank, one in enumerate(told)
    )
    if not found["export"] < LOGPROB:
        raise Failed(
            f"log-probs of the exported folder differ from those that were trained by {found['export']:.2g}"
        )
    try:
        found["bfloat16"] = _in_bfloat16(folder, said)
    except Failed as error:  # it is trained in float32
        found["bfloat16"], found["reason"] = False, str(error)
    return {key: float(f"{one:.1g}") if isinstance(one, float) else one for key, one in found.items()}


def _gradient_differences(mine: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    lacking = sorted(name for name in wanted if name not in mine)
    if lacking:
        raise Failed(f"{lacking[0]} gets no gradient")
    whole = np.sqrt(sum(float(np.square(one).sum()) for one in wanted.values()))
    parts = {name: float(np.linalg.norm(mine[name] - one)) for name, one in wanted.items()}
    total = float(np.sqrt(sum(one**2 for one in parts.values())) / whole)
    norms = {name: float(np.linalg.norm(one)) for name, one in wanted.items()}
    worst = max((parts[name] / norms[name], name) for name in wanted if norms[name] > 1e-4 * whole)
    if not total < GRADIENT or not worst[0] < ONE_GRADIENT:
        raise Failed(f"the gradient differs by {total:.2g} of its norm, that of {worst[1]} by {worst[0]:.2g}")
    return {"gradient": total, "worst gradient": worst[0]}


def _in_bfloat16(folder: Path, said: list[np.ndarray]) -> float:
    """How far the product is off in bfloat16, as a multiple of how far transformers is."""
    theirs, _ = _plain(_opened(folder, torch.bfloat16), gradient=False)
    port = _free_port()
    (mine,) = _in_forks([lambda: _bfloat16_rank(port, folder)])
    wanted = np.concatenate(said)
    off = [float(np.abs(one - wanted).mean()) for one in (mine, np.concatenate(theirs))]
    ratio = off[0] / max(off[1], 1e-6)
    if not (ratio < _BFLOAT16 or off[0] < 1e-2):
        raise Failed(
            f"in bfloat16 log-probs are off by {off[0]:.2g} in the mean, transformers' by {off[1]:.2g}"
        )
    return ratio


def _most(mine: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.nan_to_num(np.abs(mine - wanted), nan=np.inf).max())


def _settings(dtype: str) -> WorkloadSettings:
    return WorkloadSettings.read(
        {
            "seed": 11,
            "sampling": {"temperature": _TEMPERATURE},
            "loss": {"entropy_coeff": 0.01},
            "optim": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
            "collective_timeout_s": 60.0,
            "fsdp": {"dtype": dtype, "device": "cpu"},
        }
    )


def _backend(rank: int, ranks: int, port: int, folder: Path, dtype: str, *, trains: bool) -> FsdpBackend:
    settings, source = _settings(dtype), SafetensorsFolder(folder)
    return FsdpBackend(
        WorkloadContext("trial", "actor", rank, ranks, master_addr="127.0.0.1", master_port=port),
        settings,
        settings.optim,
        json.loads((folder / "config.json").read_text()),
        source,
        values=False,
        trains=trains,
        held=source.names,
    )


def _passes(rank: int, ranks: int, max_tokens: int, *, once: bool = False) -> list[Any]:
    drawn = _rows()
    rows = [
        TrainingRow(
            np.array(p, np.int32),
            np.array(t, np.int32),
            {"advantages": np.array(a, np.float32)},
            tag=(number, 0),
        )
        for number, (p, t, a) in [(at, drawn[at]) for at in _of_rank(rank, ranks)]
    ]
    return list(pack(rows, max_tokens=max_tokens, prompts_once=once))


def _rank(rank: int, ranks: int, port: int, folder: Path, checkpoint: Path) -> dict[str, Any]:
    backend = _backend(rank, ranks, port, folder, "float32", trains=True)
    try:
        once = backend.prompts_once
        together, apart = _passes(rank, ranks, 10_000, once=once), _passes(rank, ranks, 1)

        def loss(part: Any, said: torch.Tensor, entropies: torch.Tensor) -> LossSum:
            lost = (part.values["advantages"] * said + 0.1 * said.square() - 0.3 * entropies).sum()
            return LossSum(lost, torch.tensor(float(len(said))), {})

        told = {
            "packed": _joined(backend.forward(together)),
            "alone": _joined(backend.forward(apart)),
            "packing": backend.packing,
            "way": backend._model.way,
            "once": once,
        }
        backend.zero()
        backend.backward(together, loss)
        told["gradients"] = {
            name: one.grad.full_tensor().numpy().copy()
            for name, one in backend._parameters.items()
            if one.grad is not None
        }
        backend.update(count=37.0, lr=1e-2)
        for _ in backend.weights():
            pass
        told["after"] = _joined(backend.forward(together))
        model = {
            "config": backend._config,
            "decoder": None,
            "path": str(folder),
            "dtype": backend.dtype,
            "seed": 0,
        }
        backend.save(checkpoint, {"step": 1, "model": model}, lambda: None)
        backend.saved(wait=True)
        return told
    finally:
        backend.close(keep=False)


def _bfloat16_rank(port: int, folder: Path) -> np.ndarray:
    backend = _backend(0, 1, port, folder, "bfloat16", trains=False)
    try:
        passes = _passes(0, 1, _BFLOAT16_TOKENS, once=backend.prompts_once)
        said = [_joined(backend.forward([part])) for part in passes]
        return np.concatenate(said)
    finally:
        backend.close(keep=False)


def _joined(said: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([one.float().numpy() for one in said])


# Gyre's own decoder, and Megatron's, which take fewer kinds


def _by_role(role: type[Any], folder: Path, room: Path) -> dict[str, Any]:
    port = _free_port()
    (mine,) = _in_forks([lambda: _said_by_role(role, folder, room, port)])
    most = 0.0
    for found, (prompt, answer, _) in zip(mine, _rows(), strict=True):
        with torch.no_grad():
            every = _logprobs(_opened(folder), prompt, answer, temperature=1.0)
        most = max(most, _most(found, every.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()))
    if not most < LOGPROB:
        raise Failed(f"log-probs differ from transformers' by {most:.2g}")
    return {"how": role.__name__, "log-probs": float(f"{most:.1g}")}


def _said_by_role(role: type[Any], folder: Path, room: Path, port: int) -> list[np.ndarray]:
    vertex = role()
    vertex.context = WorkloadContext(
        "trial",
        "reference",
        0,
        1,
        config={"model_path": str(folder)},
        directory=room,
        master_addr="127.0.0.1",
        master_port=port,
    )
    vertex.setup()
    groups = [
        Group(
            number,
            np.array(prompt, np.int32),
            {},
            [
                Sample(
                    np.array(answer, np.int32),
                    np.zeros(len(answer), np.float32),
                    (VersionRun(0, 0, len(answer)),),
                )
            ],
        )
        for number, (prompt, answer, _) in enumerate(_rows())
    ]
    return [
        np.array(one.extras["ref_logprobs"]) for group in vertex.logprobs(groups) for one in group.samples
    ]


# The embedded engine


def _by_engine(folder: Path) -> dict[str, Any]:
    model = TransformersModel(folder)
    core = EngineCore(
        model, model.load(folder, torch.float32), Limits(8, 100_000, 512, 16), weight_version="1"
    )
    updates: list[Any] = []
    room = min(512, model.max_positions) - NEW
    prompts = [_drawn(min(count, room), count).tolist() for count in PROMPTS]
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True, temperature=1.0)
    core.submit(
        *(EngineRequest(f"r{i}", one, sampling, i, 0, updates.append) for i, one in enumerate(prompts))
    )
    with torch.inference_mode():
        while core.can_step:
            core.step()
            for update in core.take_updates():
                update.request.deliver(update)
    requests = {id(one.request): one.request for one in updates}.values()
    plain, most = _opened(folder), 0.0
    for request in requests:
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([request.tokens]), use_cache=False).logits
        every = torch.log_softmax(logits[0, request.prompt_length - 1 : -1].float(), -1)
        wanted = every.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
        most = max(most, _most(np.array(request.logprobs), wanted.numpy()))
    if len(requests) < len(PROMPTS) or not most < LOGPROB:
        raise Failed(f"log-probs differ from those of a forward without a cache by {most:.2g}")
    return {"how": type(core.runner).__name__, "log-probs": float(f"{most:.1g}")}


# Processes


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _in_forks(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns, each in a process of its own. Raises Failed where one raises or does not end in time."""
    started = [in_fork(call) for call in calls]
    until = time.monotonic() + _ANSWER_S
    answers = [answer_of(pid, end, until) for pid, end in started]
    failed = [one for one in answers if isinstance(one, Failed)]
    if failed:  # who only lost the others says the least
        raise min(failed, key=lambda one: any(word in str(one) for word in _OTHERS))
    return answers


def in_fork(call: Callable[[], Any]) -> tuple[int, int]:
    """The process that makes the call, and where its answer comes."""
    end, other = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(other)
        return pid, end
    os.close(end)
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        answer: Any = call()
    except BaseException as error:  # what a process of its own raises is its answer
        answer = Failed(_text(error))
    with os.fdopen(other, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def answer_of(pid: int, end: int, until: float) -> Any:
    """What the process answers, Failed where it ended without, or did not end in time: then it is killed."""
    os.set_blocking(end, False)
    read = b""
    while time.monotonic() < until:
        try:
            part = os.read(end, 1 << 20)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        if not part:
            break
        read += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(end)
    os.waitpid(pid, 0)
    try:
        return pickle.loads(read)
    except (EOFError, pickle.UnpicklingError):
        return Failed("its process ended, or was killed at its deadline, without an answer")


def cleared(room: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    return room
