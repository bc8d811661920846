"""What rank processes do in the tests: FSDP2's back end, and plain torch over transformers' own models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gyre.workloads.base import WorkloadContext
from tests.memory_work import saved_bytes

VOCAB = 48
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1], **_EXPERTS},
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        **_EXPERTS,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": True,
    },
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        **_EXPERTS,
    },
    # A layer between the base model and the output layer; an output and a config of their own; and one whose embedding,
    # which is the output layer too, is among the modules that are not split.
    "modernbert-decoder": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "gpt2": {"n_positions": 256},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "bert": {"is_decoder": True, "bos_token_id": None},
}
"""By transformers' type: what differs from a small decoder."""
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3+biases in attention": {"attention_bias": True},
    "llama+biases in both": {"attention_bias": True, "mlp_bias": True},
    "llama+llama3": {"rope_parameters": _LLAMA3},
    "qwen3+yarn": {"rope_parameters": _YARN},
}
_ONLY: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 8,
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
}
"""Those of single tests."""
"""The same of models that Gyre's own decoder knows too, and of their variants."""

LR, COUNT = 1e-2, 37.0
CONFIG: dict[str, Any] = {
    "seed": 11,
    "sampling": {"temperature": 0.7},
    "loss": {"entropy_coeff": 0.01},
    "optim": {"lr": LR, "weight_decay": 0.1, "clip_norm": 0.5},
    "collective_timeout_s": 30.0,
}


def fsdp(**settings: Any) -> dict[str, Any]:
    return {**CONFIG, "fsdp": settings}


def save_model(rank: int, ranks: int, port: int, kind: str, folder: Path) -> None:
    """A model drawn from a seed, in Hugging Face's layout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    changes = {**MODELS, **VARIANTS, **_ONLY}[kind]
    config = AutoConfig.for_model(kind.partition("+")[0], **{**_SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "sinks")):  # else a mistake in these would not show
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)


Rows = list[tuple[list[int], list[int], list[float]]]
"""Prompts, tokens, and an advantage of each token."""


def random_rows(count: int, *, seed: int = 0, longest: int = 14) -> Rows:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(draw.integers(1, longest))
        rows.append(
            (
                draw.integers(3, VOCAB, int(draw.integers(1, 9))).tolist(),
                draw.integers(3, VOCAB, length).tolist(),
                draw.standard_normal(length).tolist(),
            )
        )
    return rows


def grouped_rows(groups: Sequence[tuple[int, int, int]], *, seed: int = 0) -> Rows:
    """Groups of so many rows with the same prompt of so many tokens, and answers of up to so many."""
    draw = np.random.default_rng([seed, 1])
    rows: Rows = []
    for count, prompt_tokens, longest in groups:
        prompt = draw.integers(3, VOCAB, prompt_tokens).tolist()
        for length in (1, *draw.integers(1, longest + 1, count - 1).tolist()):
            answer = draw.integers(3, VOCAB, length).tolist()
            rows.append((prompt, answer, draw.standard_normal(length).tolist()))
    return rows


def passes_of(rows: Rows, max_tokens: int = 40, prompts_once: bool = False) -> list[Any]:
    from gyre.workloads.learner.packing import TrainingRow, pack

    return list(
        pack(
            [
                TrainingRow(
                    np.array(prompt, np.int32),
                    np.array(tokens, np.int32),
                    {"advantages": np.array(advantages, np.float32)},
                    tag=(index, 0),
                )
                for index, (prompt, tokens, advantages) in enumerate(rows)
            ],
            max_tokens=max_tokens,
            prompts_once=prompts_once,
        )
    )


def token_loss(part: Any, said: Any, entropies: Any) -> Any:
    """Something that asks for all of it: not linear in the log-probs, with entropies."""
    import torch

    from gyre.workloads.algorithms.losses import LossSum

    loss = (part.values["advantages"] * said + 0.1 * said.square() - 0.3 * entropies).sum()
    count = torch.tensor(float(len(said)))
    return LossSum(loss, count, {"tokens": count, "entropy": entropies.detach().sum()})


@contextmanager
def backend_on(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    *,
    values: bool = False,
    trains: bool = True,
) -> Iterator[Any]:
    from gyre.config.sections import WorkloadSettings
    from gyre.models.first_weights import with_value_head
    from gyre.models.safetensors_folder import SafetensorsFolder
    from gyre.workloads.fsdp.backend import FsdpBackend

    context = WorkloadContext("j", "actor", rank, ranks, master_addr="127.0.0.1", master_port=port)
    settings = WorkloadSettings.read(config)
    source: Any = SafetensorsFolder(folder)
    hugging_face_config = json.loads((folder / "config.json").read_text())
    if values:
        source = with_value_head(source, 32, 3)
    backend = FsdpBackend(
        context, settings, settings.optim, hugging_face_config, source, values=values, trains=trains
    )
    try:
        yield backend
    finally:
        backend.close(keep=False)


def gradients(backend: Any) -> dict[str, Any]:
    """Whole, by the model's names. A call of all ranks."""
    return {
        name: parameter.grad.full_tensor().cpu().numpy().copy()
        for name, parameter in backend._parameters.items()
    }


def on_host(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.float().cpu().numpy().copy() for name, tensor in tensors.items()}


def take_steps(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    steps: Sequence[Rows],
    values: bool = False,
) -> dict[str, Any]:
    """The rows of each step dealt over the ranks; what came of it."""
    with backend_on(rank, ranks, port, folder, config, values=values) as backend:
        told: dict[str, Any] = {"packs": backend.packs, "packing": backend.packing, "losses": [], "norms": []}
        for number, rows in enumerate(steps):
            mine = passes_of(rows[rank::ranks], prompts_once=backend.prompts_once)
            if number == 0:
                told["trees"] = [len(part.lengths) for part in mine if part.parents]
                said = [part.numpy() for part in backend.forward(mine)]
                told["said"] = np.concatenate(said) if said else np.zeros(0, np.float32)
            backend.zero()
            lost = backend.backward(mine, token_loss)
            sums = [[float(one.loss), float(one.weight)] for one in lost]
            told["losses"].append(backend.ranks.sum(np.sum(np.array(sums).reshape(-1, 2), axis=0).tolist()))
            if number == 0:
                told["gradients"] = gradients(backend)
            told["norms"].append(backend.update(count=COUNT, lr=LR))
        told["weights"] = on_host(dict(backend.weights()))
        told["after"] = np.concatenate([part.numpy() for part in backend.forward(passes_of(steps[0]))])
        return told


def once_and_each(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    rows: Rows,
    max_tokens: int,
    values: bool = False,
) -> dict[str, Any]:
    """What is said, the losses and the gradient where each row has its prompt, and where a prompt is there once, which
    is made twice."""
    with backend_on(rank, ranks, port, folder, config, values=values) as backend:
        assert backend.prompts_once, backend.packing
        told: dict[str, Any] = {}
        for name, once in (("each", False), ("once", True), ("again", True)):
            mine = passes_of(rows[rank::ranks], max_tokens, prompts_once=once)
            told[name] = _made_of(backend, mine)
        return told


def kept_and_again(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    rows: Rows,
) -> dict[str, Any]:
    """The same passes with activations kept, computed again, and kept once more; and the bytes that autograd saved of
    them."""
    with backend_on(rank, ranks, port, folder, config) as backend:
        assert backend.may_recompute, backend.status()
        mine = passes_of(rows[rank::ranks], 90, prompts_once=backend.prompts_once)
        told: dict[str, Any] = {"trees": sum(bool(part.parents) for part in mine)}
        for name, on in (("kept", False), ("again", True), ("kept once more", False)):
            backend.recompute(on=on)
            with saved_bytes() as saved:
                told[name] = {**_made_of(backend, mine), "saved": 0}
            told[name]["saved"] = sum(saved)
        return told


def a_deep_tree(rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The same of sessions of several turns, whose nodes share what is shared, to a depth of 4, and of the sequences
    that are their paths."""
    from gyre.workloads.learner.packing import laid_out, pack
    from tests.workloads.learner.trees import drawn_tree, rows_of_tree

    nodes = drawn_tree(VOCAB)
    with backend_on(rank, ranks, port, folder, config) as backend:
        apart = list(pack(rows_of_tree(nodes), max_tokens=60))
        return {"each": _made_of(backend, apart), "once": _made_of(backend, [laid_out(nodes)])}


def a_tree_for_any_model(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any]
) -> dict[str, Any]:
    rows = grouped_rows([(3, 12, 5)], seed=8)
    with backend_on(rank, ranks, port, folder, config) as backend:
        assert not backend.packs
        return {
            name: _made_of(backend, passes_of(rows, 200, prompts_once=once))
            for name, once in (("each", False), ("once", True))
        }


def _made_of(backend: Any, passes: list[Any]) -> dict[str, Any]:
    said = np.concatenate([part.numpy() for part in backend.forward(passes)])
    backend.zero()
    lost = backend.backward(passes, token_loss)
    return {
        "said": said,
        "loss": sum(float(one.loss) for one in lost),
        "gradients": gradients(backend),
        "tokens": sum(len(part.tokens) for part in passes),
    }


def read_back(
    rank: int, ranks: int, port: int, folder: Path, weights: dict[str, Any], rows: Rows, into: Path
) -> tuple[Any, dict[str, Any]]:
    """What transformers' own model says of the rows with these weights, written to a folder as they are; and the names
    that `from_pretrained` missed or did not know."""
    import shutil

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    into.mkdir()
    shutil.copy(folder / "config.json", into)
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        said = [_said_by(model.eval(), passes_of([row])[0])[0].numpy() for row in rows]
    return np.concatenate(said), {name: sorted(map(str, found)) for name, found in info.items() if found}


def _said_by(model: Any, part: Any) -> tuple[Any, Any]:
    """Log-probs and entropies of one row's tokens."""
    import torch

    logits = model(part.tokens[None], use_cache=False).logits[0, part.columns]
    log_p = torch.log_softmax(logits.float() / CONFIG["sampling"]["temperature"], dim=-1)
    return log_p.gather(1, part.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def take_plain_steps(
    rank: int, ranks: int, port: int, folder: Path, steps: Sequence[Rows], values: bool = False
) -> dict[str, Any]:
    """The same by transformers' own model in one process, each row by itself, its logits whole."""
    import torch
    from transformers import AutoModelForCausalLM

    from gyre.models.first_weights import with_value_head

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trained = {
        name: one for name, one in model.named_parameters() if not (values and name == "lm_head.weight")
    }
    if values:
        source = with_value_head(lambda name: torch.zeros(0), 32, 3)
        for name in ("value_head.weight", "value_head.bias"):
            trained[name] = torch.nn.Parameter(source(name))
    decayed = [one for name, one in trained.items() if one.ndim > 1 and not name.endswith("bias")]
    others = [one for name, one in trained.items() if one.ndim == 1 or name.endswith("bias")]
    optim = CONFIG["optim"]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    def said_of(part: Any) -> tuple[Any, Any]:
        if values:
            hidden = model.model(part.tokens[None], use_cache=False).last_hidden_state[0, part.columns]
            found = (hidden @ trained["value_head.weight"].T + trained["value_head.bias"])[:, 0]
            return found, torch.zeros_like(found)
        return _said_by(model, part)

    told: dict[str, Any] = {"losses": [], "norms": []}
    for number, rows in enumerate(steps):
        alone = [passes_of([row])[0] for row in rows]
        optimizer.zero_grad()
        sums = np.zeros(2)
        said = []
        for part in alone:
            found = said_of(part)
            lost = token_loss(part, *found)
            lost.loss.backward()
            sums += [float(lost.loss.detach()), float(lost.weight)]
            said.append(found[0].detach().numpy())
        told["losses"].append(sums.tolist())
        for one in trained.values():
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        if number == 0:
            told["said"] = said
            told["gradients"] = {name: one.grad.numpy().copy() for name, one in trained.items()}
        for one in trained.values():
            one.grad /= COUNT
        told["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained.values(), optim["clip_norm"])))
        optimizer.step()
    told["parameters"] = {name: one.detach().numpy().copy() for name, one in trained.items()}
    return told


def _step(backend: Any, rows: Rows, ranks: int) -> float:
    backend.zero()
    backend.backward(passes_of(rows[backend.ranks.rank :: ranks]), token_loss)
    return float(backend.update(count=COUNT, lr=LR))


def whole_of(local: Any, parameter: Any) -> Any:
    """What every rank has of a tensor that is sharded as the parameter. A call of all ranks."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride).full_tensor()


def state_of(backend: Any) -> dict[str, Any]:
    """Every whole tensor that a step depends on. A call of all ranks."""
    found = on_host(dict(backend.weights()))
    for name, parameter in backend._parameters.items():
        for what, value in backend._optimizer.state[backend._locals[name]].items():
            whole = whole_of(value, parameter) if value.ndim else value
            found[f"{name}/{what}"] = whole.cpu().numpy().copy()
    return found


def step_save_step(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    path: Path,
    steps: Sequence[Rows],
    values: bool = False,
) -> dict[str, Any]:
    """A step, a checkpoint that is written while the next step is made, and the state before and after that step."""
    import threading

    import torch

    from gyre.workloads.learner import checkpoint_writer

    go, write = threading.Event(), checkpoint_writer._write_files

    def late(*given: Any) -> None:
        assert go.wait(30)
        write(*given)

    checkpoint_writer._write_files = late
    try:
        with backend_on(rank, ranks, port, folder, config, values=values) as backend:
            assert backend.saved(wait=False)
            _step(backend, steps[0], ranks)
            at = state_of(backend)
            backend.save(path, {"step": 1, "rank_was": [0, "text"]}, lambda: "a digest")
            drawn = torch.rand(3).tolist()
            early = backend.saved(wait=False)
            norm = _step(backend, steps[1], ranks)
            go.set()
            assert backend.saved(wait=True)
            return {"at": at, "early": early, "norm": norm, "after": state_of(backend), "drawn": drawn}
    finally:
        checkpoint_writer._write_files = write


def restore_and_step(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    config: dict[str, Any],
    path: Path,
    steps: Sequence[Rows],
    values: bool = False,
) -> dict[str, Any]:
    """Another model's weights and another step's moments, which the checkpoint must replace."""
    import torch

    with backend_on(rank, ranks, port, folder, config, values=values) as backend:
        _step(backend, steps[1], ranks)
        metadata = backend.restore(path)
        drawn = torch.rand(3).tolist()
        at = state_of(backend)
        norm = _step(backend, steps[1], ranks)
        return {"at": at, "metadata": metadata, "norm": norm, "after": state_of(backend), "drawn": drawn}


def refused_restores(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], paths: Sequence[Path]
) -> list[tuple[str, bool]]:
    """What each restore says, and whether the state is then as it was."""
    from gyre.workloads.learner.errors import CheckpointMismatch

    found = []
    with backend_on(rank, ranks, port, folder, config) as backend:
        before = state_of(backend)
        for path in paths:
            said = ""
            try:
                backend.restore(path)
            except CheckpointMismatch as error:
                said = str(error)
            after = state_of(backend)
            found.append((said, all(np.array_equal(after[name], one) for name, one in before.items())))
    return found


def given_up_save(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], first: Path, second: Path
) -> dict[str, Any]:
    """A save begun while an earlier one is not finished."""
    import threading

    from gyre.workloads.learner import checkpoint_writer

    go, write = threading.Event(), checkpoint_writer._write_files

    def late(path: Path, pieces: Any, content: Any, stop: Any, options: Any) -> None:
        if path.parent == first:
            assert stop.wait(30)
        write(path, pieces, content, stop, options)

    checkpoint_writer._write_files = late
    try:
        with backend_on(rank, ranks, port, folder, config) as backend:
            backend.save(first, {"save": 1, "step": 1}, lambda: None)
            backend.save(second, {"save": 2, "step": 1}, lambda: None)
            told = {"written": backend.saved(wait=True)}
            go.set()
            told["first"] = sorted(one.name for one in first.iterdir() if one.suffix == ".json")
            told["second"] = backend.restore(second)
            return told
    finally:
        checkpoint_writer._write_files = write


def save_where_one_cannot(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path
) -> str:
    """The second rank's disk is full."""
    from gyre.workloads.learner import checkpoint_writer
    from gyre.workloads.learner.errors import CheckpointMismatch

    write = checkpoint_writer._write_files

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        checkpoint_writer._write_files = full
    try:
        with backend_on(rank, ranks, port, folder, config) as backend:
            backend.save(path, {"step": 1}, lambda: None)
            try:
                backend.saved(wait=True)
            except CheckpointMismatch as error:
                return str(error)
            return ""
    finally:
        checkpoint_writer._write_files = write


def refused_updates(rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The second rank's loss has a gradient that is not finite; then a step like any other."""
    import torch

    from gyre.workloads.learner.errors import NotFinite

    rows = random_rows(6, seed=4)
    told: dict[str, Any] = {"refused": []}
    with backend_on(rank, ranks, port, folder, config) as backend:
        before = state_of(backend)
        for spoil in (float("nan"), float("inf")):

            def spoiled(part: Any, said: Any, entropies: Any, spoil: float = spoil) -> Any:
                lost = token_loss(part, said, entropies)
                by = spoil if rank == 1 else 1.0
                return type(lost)(lost.loss * torch.tensor(by), lost.weight, lost.metrics)

            backend.zero()
            backend.backward(passes_of(rows[rank::ranks]), spoiled)
            try:
                backend.update(count=COUNT, lr=LR)
            except NotFinite as error:
                told["refused"].append(error.code)
        after = state_of(backend)
        told["untouched"] = all(np.array_equal(after[name], one) for name, one in before.items())
        told["gone"] = all(parameter.grad is None for parameter in backend._parameters.values())
        told["next"] = _step(backend, rows, ranks)
    return told


def refused_without_gradient(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any]
) -> dict[str, Any]:
    """A step in which one parameter got no gradient; then a step like any other."""
    from gyre.workloads.fsdp.errors import NoGradient

    rows = random_rows(6, seed=4)
    told: dict[str, Any] = {}
    with backend_on(rank, ranks, port, folder, config) as backend:
        before = state_of(backend)
        backend.zero()
        backend.backward(passes_of(rows[rank::ranks]), token_loss)
        name = next(name for name in backend._parameters if name.endswith("norm.weight"))
        backend._parameters[name].grad = None
        try:
            backend.update(count=COUNT, lr=LR)
        except NoGradient as error:
            told |= {"code": error.code, "named": name in error.message}
        after = state_of(backend)
        told["untouched"] = all(np.array_equal(after[key], one) for key, one in before.items())
        told["next"] = _step(backend, rows, ranks)
    return told


def uneven_step(rank: int, ranks: int, port: int, folder: Path) -> float:
    """A step in which all ranks but the first have a sequence of three tokens."""
    rows = [([5, 6], list(range(3, 47)), [1.0] * 44), *[([7, 8], [9], [1.0])] * (ranks - 1)]
    with backend_on(rank, ranks, port, folder, CONFIG) as backend:
        return _step(backend, rows, ranks)


def a_loss_that_raises(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any]
) -> dict[str, Any]:
    """The first rank's loss raises in its first of several passes; then a step like any other."""
    rows = random_rows(6, seed=4)

    def broken(part: Any, said: Any, entropies: Any) -> Any:
        if rank == 0:
            raise ValueError("a loss that does not like this sample")
        return token_loss(part, said, entropies)

    with backend_on(rank, ranks, port, folder, config) as backend:
        told = ""
        try:
            backend.backward(passes_of(rows[rank::ranks], max_tokens=12), broken)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        return {"told": told, "next": _step(backend, rows, ranks)}


def loads(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], other: Path
) -> dict[str, Any]:
    """Weights of another shape, weights that lack one on the first rank alone, weights with NaN on the last, and then
    the model's own twice over."""
    from gyre.models.errors import ModelFolderError
    from gyre.models.safetensors_folder import SafetensorsFolder
    from gyre.weights.version.manifest import WeightMismatch

    own = SafetensorsFolder(folder).tensors()
    lacking = {name: one for name, one in own.items() if rank or not name.endswith("model.norm.weight")}
    broken = {name: one.clone() for name, one in own.items()}
    broken["lm_head.weight"][-1, 0] = float("nan")
    rows = random_rows(6, seed=4)
    told: dict[str, Any] = {"refused": []}
    with backend_on(rank, ranks, port, folder, config) as backend:
        first = _step(backend, rows, ranks)
        before = state_of(backend)
        for source in (SafetensorsFolder(other), lacking.__getitem__, broken.__getitem__):
            try:
                backend.load(source)
            except (WeightMismatch, ModelFolderError) as error:
                told["refused"].append(str(error))
        after = state_of(backend)
        told["untouched"] = all(np.array_equal(after[name], one) for name, one in before.items())
        backend.load({name: 2 * one for name, one in own.items()}.__getitem__)
        told["doubled"] = all(
            np.array_equal(one, 2 * own[name].numpy())
            for name, one in on_host(dict(backend.weights())).items()
        )
        backend.load(own.__getitem__)
        told["as at first"] = _step(backend, rows, ranks) == first
    return told


def only_forward(rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path) -> Any:
    """A model that does not train: what it says, with the folder's weights and with a checkpoint's."""
    rows = random_rows(5, seed=4)
    with backend_on(rank, ranks, port, folder, config, trains=False) as backend:
        first = [part.numpy() for part in backend.forward(passes_of(rows))]
        backend.restore(path)
        return np.concatenate(first), np.concatenate(
            [one.numpy() for one in backend.forward(passes_of(rows))]
        )


def says_in_pieces(rank: int, ranks: int, port: int, seed: int) -> None:
    """Log-probs of a few tokens at a time against all at once, in float32, with the gradients."""
    import torch

    from gyre.workloads.fsdp import logprobs

    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(11, 6, generator=generator, requires_grad=True)
    layer = torch.nn.Linear(6, 13)
    targets = torch.randint(0, 13, (11,), generator=generator)
    by = [torch.randn(11, generator=generator) for _ in range(2)]

    def head(states: Any) -> Any:
        return torch.tanh(layer(states)) * 3

    elements, inputs = logprobs.PIECE_ELEMENTS, [hidden, *layer.parameters()]
    try:
        for size in (13, 4 * 13 + 1, 1 << 27):
            for entropy_gradient in (True, False):
                logprobs.PIECE_ELEMENTS = size
                found = logprobs.head_logprobs(
                    head,
                    list(layer.parameters()),
                    hidden,
                    targets,
                    vocab=13,
                    scale=0.6,
                    entropy_gradient=entropy_gradient,
                )
                log_p = torch.log_softmax(head(hidden) * 0.6, dim=-1)
                entropies = -(log_p.exp() * log_p).sum(-1)
                wanted = log_p.gather(1, targets[:, None])[:, 0], entropies
                torch.testing.assert_close(found, wanted)
                assert found[1].requires_grad == entropy_gradient
                used = 2 if entropy_gradient else 1
                gradients = torch.autograd.grad(found[:used], inputs, by[:used])
                torch.testing.assert_close(gradients, torch.autograd.grad(wanted[:used], inputs, by[:used]))
    finally:
        logprobs.PIECE_ELEMENTS = elements


def a_model_that_packs_wrongly(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], rows: Rows
) -> tuple[bool, str, Any]:
    """Its attention is given neither positions nor lengths, so that it sees one sequence, on one rank alone."""
    from gyre.workloads.fsdp.token_model import TokenModel

    forward = TokenModel.forward

    def careless(self: Any, tokens: Any, positions: Any, *rest: Any, **named: Any) -> Any:
        import torch

        if rank == 0:
            positions, named["lengths"] = torch.arange(len(tokens)), [len(tokens)]
        return forward(self, tokens, positions, *rest, **named)

    TokenModel.forward = careless
    try:
        with backend_on(rank, ranks, port, folder, config) as backend:
            said = [part.numpy() for part in backend.forward(passes_of(rows[rank::ranks]))]
            return backend.packs, backend.packing, np.concatenate(said)
    finally:
        TokenModel.forward = forward


def a_model_that_does_not_bear_trees(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], rows: Rows, *, in_small: bool
) -> dict[str, Any]:
    """On one rank alone its branches see the beginning of what they go on after: by its code, which a small copy shows,
    or by a kernel that only the model itself uses."""
    import torch

    from gyre.workloads.fsdp import backend as module
    from gyre.workloads.fsdp import packed_attention

    seen, try_small = packed_attention._seen, module.try_small

    def upper_left(queries: int, keys: int, window: int, device: Any) -> Any:
        every = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return every.tril() & ~every.tril(-window)

    def then_otherwise(*args: Any, **named: Any) -> Any:
        found = try_small(*args, **named)
        packed_attention._seen = upper_left if rank == 0 else seen
        return found

    if in_small and rank == 0:
        packed_attention._seen = upper_left
    module.try_small = try_small if in_small else then_otherwise
    try:
        with backend_on(rank, ranks, port, folder, config) as backend:
            mine = passes_of(rows[rank::ranks], 90, prompts_once=backend.prompts_once)
            made = _made_of(backend, mine)
            return {"packs": backend.packs, "once": backend.prompts_once, "packing": backend.packing, **made}
    finally:
        packed_attention._seen, module.try_small = seen, try_small


def members(rank: int, ranks: int, port: int, folder: Path) -> tuple[list[str], list[str], dict[str, Any]]:
    """What the protocols name and the back end or its ranks lack; and its facts for people."""
    from gyre.workloads.learner.backend import LearnerBackend, Ranks

    def lacking(protocol: Any, thing: Any) -> list[str]:
        names = [name for name in vars(protocol) if not name.startswith("_")]
        return [name for name in names if not hasattr(thing, name)]

    with backend_on(rank, ranks, port, folder, CONFIG) as backend:
        backend.prepare()
        backend.unlink()
        return lacking(LearnerBackend, backend), lacking(Ranks, backend.ranks), backend.status()
