"""Which models there are to train and serve, and what a folder is to those who do. Who takes what, the records of back
ends and engines say: `gyre models` prints the table of both, the docs show it, `plan` refuses by it.

The kinds that only transformers computes are those of `gyre.models.tried`.

Nothing here reads a tensor: `config.json` and the safetensors' headers are enough, in milliseconds.

Invariant *a reason in a sentence*: whoever does not take a folder says why, with the key or the file.

This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from gyre.models.architecture import Architecture, read_architecture, read_config, read_eos_token_ids
from gyre.models.errors import ModelFolderError, NotComputed
from gyre.models.safetensors_files import (
    ANOTHER_MODEL,
    TensorEntry,
    refuse_narrow,
    refuse_other_formats,
    refuse_other_head,
    require_tensors,
    weight_files,
)
from gyre.models.tensor_names import EMBEDDING, HEAD, SCORE, expected_shapes
from gyre.models.transformers_models import refuse_not_causal
from gyre.models.tried import problem_with


class Taker(Protocol):
    """Who trains models, or serves them: a back end's record, or an engine's."""

    @property
    def name(self) -> str: ...
    @property
    def by_transformers(self) -> bool:
        """Whether it computes by transformers, and so more models than Gyre's own decoder."""
        ...

    @property
    def lacks(self) -> frozenset[str]:
        """The rows of `SUPPORT`, by their keys, whose models it does not take."""
        ...

    @property
    def unfit(self) -> Callable[[Architecture], str]:
        """Why it does not take a model whose shape can be read; "" where it does."""
        ...


def takes_all(architecture: Architecture) -> str:
    """Of who takes every model whose shape can be read."""
    return ""


@dataclass(frozen=True, slots=True)
class SupportRow:
    """A kind of model, or a property of one, and what `config.json` says of it. `key` is by what a record says that it
    lacks this; "" for what everybody takes."""

    name: str
    config: str
    key: str = ""

    def takes(self, who: Taker) -> bool:
        return self.key not in who.lacks


SUPPORT = (
    SupportRow("Qwen2, Qwen2.5 (dense)", 'model_type: "qwen2"'),
    SupportRow("Qwen3 (dense)", 'model_type: "qwen3"'),
    SupportRow("Llama 2, 3 and models of its shape", 'model_type: "llama"'),
    SupportRow("output layer tied to the embedding, or its own", "tie_word_embeddings"),
    SupportRow("grouped-query attention", "num_key_value_heads"),
    SupportRow("rotary positions: default, linear, llama3", "rope_scaling, rope_parameters"),
    SupportRow(
        "rotary positions: yarn, dynamic, longrope, mrope", "rope_scaling, …", "other rotary positions"
    ),
    SupportRow("biases in attention alone", "attention_bias of qwen3 and llama", "attention_bias"),
    SupportRow("biases in attention and MLP", "attention_bias, mlp_bias of llama", "mlp_bias"),
    SupportRow("a sliding window that is active", "use_sliding_window, layer_types", "sliding window"),
    SupportRow("mixtures of experts", "num_experts, num_local_experts", "experts"),
    SupportRow("quantized weights", "quantization_config", "quantized"),
    SupportRow("images and sound", "vision_config, audio_config", "images and sound"),
    SupportRow("every other kind that was tried (Gemma, Mistral, Phi, …)", "model_type", "other kinds"),
)
"""Of an engine of others it is what that engine serves by itself: a job serves what it trains, so the row's other
columns hold there too. Which kinds were tried, `gyre.models.tried` says."""

OTHERS = "other kinds"
"""The row of the kinds that Gyre's own decoder does not compute."""

BEYOND_TRANSFORMERS = frozenset(("quantized", "images and sound"))
"""What is not computed by transformers here."""

BEYOND_DECODER = BEYOND_TRANSFORMERS | {"other rotary positions", "sliding window", "experts", OTHERS}
"""What Gyre's own decoder does not compute."""


def markdown_table(columns: Sequence[Taker]) -> str:
    """The table as the docs show it: back ends, then engines."""
    lines = [
        f"| model | in `config.json` | {' | '.join(who.name for who in columns)} |",
        f"| --- | --- | {' | '.join('---' for _ in columns)} |",
        *(
            f"| {row.name} | {row.config.replace('|', '')} | "
            + " | ".join("yes" if row.takes(who) else "no" for who in columns)
            + " |"
            for row in SUPPORT
        ),
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A model's folder. `problem` is why nothing of Gyre's takes it, "" where something does; `refused` has the reason
    of each that does not of those who train (`back_ends`) and serve (`engines`)."""

    path: str
    model_type: str
    problem: str
    refused: dict[str, str]
    back_ends: tuple[str, ...]
    engines: tuple[str, ...]
    architecture: Architecture | None = None
    parameters: int = 0
    dtype: str = ""
    size_bytes: int = 0
    files: int = 0

    def as_dict(self) -> dict[str, Any]:
        a = self.architecture
        return {
            "path": self.path,
            "model_type": self.model_type,
            "parameters": self.parameters or None,
            "tied": a.tied if a else None,
            "context": a.max_positions if a else None,
            "vocabulary": a.vocab if a else None,
            "layers": a.layers if a else None,
            "rope": a.rope.kind if a else None,
            "weights": {"dtype": self.dtype, "files": self.files, "size_bytes": self.size_bytes},
            "problem": self.problem,
            "trains": {who: self._answer(who) for who in self.back_ends},
            "serves": {who: self._answer(who) for who in self.engines},
        }

    def _answer(self, who: str) -> dict[str, Any]:
        reason = self.refused.get(who, "")
        return {"takes": not reason, "reason": reason}


def describe(folder: Path, back_ends: Sequence[Taker], engines: Sequence[Taker]) -> FolderReport:
    """What a folder is, and who of these trains and serves it. Raises ModelFolderError where it is no model's
    folder."""
    refuse_no_folder(folder, "FOLDER")
    config = read_config(folder)
    kind = str(config.get("model_type"))
    try:
        architecture = read_architecture(folder)
        held = weights_of(folder, architecture)
    except ModelFolderError as error:
        return _of_another(folder, kind, config, error, back_ends, engines)
    dtype, size_bytes = _sizes(held)
    return FolderReport(
        path=str(folder),
        model_type=kind,
        problem="",
        refused={who.name: reason for who in (*back_ends, *engines) if (reason := who.unfit(architecture))},
        back_ends=_names(back_ends),
        engines=_names(engines),
        architecture=architecture,
        parameters=sum(prod(shape) for shape in expected_shapes(architecture).values()),
        dtype=dtype,
        size_bytes=size_bytes,
        files=len(held),
    )


def _names(takers: Iterable[Taker]) -> tuple[str, ...]:
    return tuple(who.name for who in takers)


def _of_another(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    error: ModelFolderError,
    back_ends: Sequence[Taker],
    engines: Sequence[Taker],
) -> FolderReport:
    """The report of a folder that Gyre's own decoder does not take, for this reason."""
    takers = (*back_ends, *engines)
    by_transformers = _names(who for who in takers if who.by_transformers)
    ours = (who for who in takers if who.by_transformers or who.lacks >= BEYOND_DECODER)
    refused = dict.fromkeys(_names(ours), error.message)
    if isinstance(error, NotComputed):
        try:
            refuse_another(folder, config)
            held = weights_of_another(folder, config)
        except ModelFolderError as other:
            refused |= dict.fromkeys(by_transformers, other.message)
        else:
            refused |= {who: problem_with(config, who) for who in by_transformers}
            left = {who: reason for who, reason in refused.items() if reason}
            dtype, size_bytes = _sizes(held)
            parameters = sum(prod(one.shape) for entries in held.values() for one in entries)
            return FolderReport(
                str(folder),
                kind,
                "",
                left,
                _names(back_ends),
                _names(engines),
                parameters=parameters,
                dtype=dtype,
                size_bytes=size_bytes,
                files=len(held),
            )
    return FolderReport(str(folder), kind, error.message, refused, _names(back_ends), _names(engines))


def _sizes(held: Mapping[Path, Sequence[TensorEntry]]) -> tuple[str, int]:
    """The dtype of most bytes, and the bytes of all tensors."""
    sizes: dict[str, int] = {}
    for entry in (one for entries in held.values() for one in entries):
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size_bytes
    return max(sizes, key=lambda name: sizes[name], default=""), sum(sizes.values())


def refuse_another(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelFolderError where the folder, whose `config.json` holds `config`, is of no model that transformers
    computes, as far as files tell."""
    refuse_not_causal(config, str(folder / "config.json"))
    if isinstance(config.get("vocab_size"), int):  # else the family's, which only transformers knows
        read_eos_token_ids(folder, dict(config), config["vocab_size"])


def weights_of_another(
    folder: Path, config: Mapping[str, Any], *, head: str | None = HEAD
) -> dict[Path, tuple[TensorEntry, ...]]:
    """The folder's files of weights, of a model that only transformers knows: its other names are transformers' to
    compare. Raises ModelFolderError where there are none, or no output layer although the model has one of its own.
    `head` is as for `require_tensors`."""
    held = weight_files(folder)
    if not held:
        refuse_other_formats(folder)
        raise ModelFolderError(
            f"{folder} holds no weights, and of this kind of model they are not drawn from the seed.",
            hint="Write some: AutoModelForCausalLM.from_config(config).save_pretrained(folder), of transformers.",
        )
    found = {entry.name: entry for entries in held.values() for entry in entries}
    if head == SCORE and found.get(SCORE, _NO_TENSOR).shape[:1] != (1,):
        raise ModelFolderError(
            f"{folder} has no tensor {SCORE} for one label.",
            hint="A reward model is one for sequence classification with one label.",
        )
    untied = config.get("tie_word_embeddings") is False
    if head == HEAD and untied and HEAD not in found and EMBEDDING in found:
        raise ModelFolderError(
            f"{folder} lacks {HEAD}, and its config.json says that it is not the embedding (tie_word_embeddings).",
            hint="Set tie_word_embeddings to true, if it is.",
        )
    if head == HEAD and config.get("tie_word_embeddings") is True:
        refuse_other_head(held, folder)
    for entry in found.values():
        refuse_narrow(entry, folder)
    wanted, embedding = (config.get("vocab_size"), config.get("hidden_size")), found.get(EMBEDDING)
    if embedding is not None and None not in wanted and embedding.shape != wanted:
        raise ModelFolderError(
            f"{folder}: tensor {EMBEDDING} is {embedding.shape}, and config.json says {wanted} (vocab_size, "
            "hidden_size).",
            hint=ANOTHER_MODEL,
        )
    return held


_NO_TENSOR = TensorEntry("", "", (), 0, 0)


def refuse_no_folder(folder: Path, key: str) -> None:
    """Raises ModelFolderError, which begins with `key`, where there is no model's folder: a name on the Hub gets the
    command that downloads it."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelFolderError(
            f"{key}: {folder} holds an adapter (adapter_config.json), not a whole model.",
            hint="Merge it into its model, by peft's merge_and_unload and save_pretrained.",
        )
    if folder.is_dir():
        raise ModelFolderError(
            f"{key}: {folder} has no config.json, so it is no model's folder.",
            hint="Give a folder in Hugging Face's layout, as save_pretrained writes it.",
        )
    text = folder.as_posix()
    if is_hub_name(text):
        raise ModelFolderError(
            f"{key}: {text} is no folder on this machine; it looks like a name on the Hugging Face Hub.",
            hint=f"Download it: hf download {text} --local-dir models/{folder.name}, and give that folder.",
        )
    looked = "" if folder.is_absolute() else f" (looked for {folder.absolute()})"
    raise ModelFolderError(
        f"{key}: {folder} is no folder on this machine{looked}.",
        hint="Give a folder in Hugging Face's layout.",
    )


def is_hub_name(text: str) -> bool:
    """Whether a text may be `owner/name`: two parts, neither of them a usual folder's."""
    owner, _, name = text.partition("/")
    usual = {"models", "model", "data", "checkpoints", "out", "output", "weights", "..", "~", "."}
    return bool(owner and name) and "/" not in name and owner not in usual and not text.startswith(".")


def weights_of(
    folder: Path, architecture: Architecture, *, head: str | None = HEAD
) -> dict[Path, tuple[TensorEntry, ...]]:
    """The folder's files of weights; none where it holds weights of no kind, which are then drawn from the seed. Raises
    ModelFolderError where they are not those of the architecture. `head` is as for `require_tensors`."""
    held = weight_files(folder)
    if held:
        found = {entry.name: entry for entries in held.values() for entry in entries}
        require_tensors(found, architecture, folder, head=head)
        if head == HEAD and architecture.tied:
            refuse_other_head(held, folder)
    else:
        refuse_other_formats(folder)
    return held


def differences(theirs: Architecture, ours: Architecture, *, of_folder: bool) -> list[str]:
    """How two models differ in shape, each a text that names the key: of `config.json` for the model of a folder, of
    the job's `config.model` for the small decoder. What no weight depends on may differ."""
    found = []
    for key, small, read in _SHAPE_KEYS:
        here, there = read(ours), read(theirs)
        if here != there:
            found.append(f"{key if of_folder else small or key} is {_shown(there)} instead of {_shown(here)}")
    return found


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_SHAPE_KEYS: tuple[tuple[str, str, Callable[[Architecture], Any]], ...] = (
    ("model_type", "", lambda a: a.family),
    ("vocab_size", "", lambda a: a.vocab),
    ("num_hidden_layers", "layers", lambda a: a.layers),
    ("hidden_size", "hidden", lambda a: a.hidden),
    ("num_attention_heads", "heads", lambda a: a.heads),
    ("num_key_value_heads", "kv_heads", lambda a: a.kv_heads),
    ("head_dim", "", lambda a: a.head_dim),
    ("intermediate_size", "mlp", lambda a: a.mlp),
    ("rms_norm_eps", "norm_eps", lambda a: a.norm_eps),
    ("rope_theta", "rope_theta", lambda a: a.rope.theta),
    ("rope_scaling", "", lambda a: asdict(a.rope) | {"theta": None}),
    ("tie_word_embeddings", "tied_embeddings", lambda a: a.tied),
    ("attention_bias", "", lambda a: (a.qkv_bias, a.out_bias)),
    ("mlp_bias", "", lambda a: a.mlp_bias),
)
"""The key of a shape's part in `config.json`, that of `config.model` where it has one, and the part."""
