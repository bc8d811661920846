"""Gyre's part of vLLM's workers, one for each rank, under vLLM's own Python: `--worker-extension-cls` mixes
`GyreWorker` into vLLM's worker, and the server calls its methods there between two steps.

Invariants:
- *checked, then loaded*: a reload of vLLM's empties the layers first, and one that breaks off leaves a mixture. So
  names and shapes of a folder are compared with those of the model before; if it breaks off all the same, the folder
  before is loaded again, or the answer says that the weights are torn;
- *nothing escapes*: an exception that left a method would be an error of the whole engine, so each becomes an answer;
- *the seed belongs to the sample*: the token at position p is drawn by (seed, p) alone, whatever else runs and wherever
  the sample began. vLLM's own generators go on from wherever a request began;
- *log-probs are those of the draw's temperature*, before top_p, top_k and min_p, which is what a trainer computes.

It runs where Gyre is not installed: it must import nothing of Gyre but its loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gyre_weight_loader import Rank
from safetensors import safe_open

SEED = "gyre_seed"
"""In a request's `extra_args`: its seed, of which vLLM must not make a generator of its own."""

_COLDEST = 1e-5
"""vLLM's limit, below which it takes the likeliest token."""


class GyreWorker:
    """Mixed into vLLM's worker: `model_runner`, `model_config` and `reload_weights` are the worker's."""

    model_runner: Any
    model_config: Any
    reload_weights: Any

    def gyre_begin(self) -> None:
        """Before the first request."""
        self._gyre_rank: Rank | None = None
        self._gyre_folder = str(self.model_config.model)
        """Which weights are served, as far as they came from a folder; "" where they did not."""
        self._gyre_tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        self._gyre_shapes = _shapes(Path(self._gyre_folder), self._gyre_tied)
        _draw_by_position(self.model_runner)

    def gyre_load(self) -> str:
        """As `gyre_weight_loader.load`: the first call arms the loader, and each further one copies what it prepared.
        The outcome is asked of the loader's socket; what is returned is why it was not armed, "" else."""
        try:
            if self._gyre_rank is None:
                self._gyre_rank = Rank(self.model_runner.device)
                return ""
        except BaseException as error:
            return _told(error)
        self._gyre_folder = ""
        self._gyre_rank.commit(self._gyre_reload, self._gyre_made)
        return ""

    def gyre_load_folder(self, path: str) -> str:
        """Load the weights in a folder; why not, "" where they are loaded."""
        try:
            found, known = _shapes(Path(path), self._gyre_tied), self._gyre_shapes
            if not found:
                return f"{path} holds no safetensors"
            if known and found != known:
                wrong = sorted(
                    name for name in found.keys() | known.keys() if found.get(name) != known.get(name)
                )
                return (
                    f"{path} holds another model: {len(wrong)} tensors differ in name or shape, as {wrong[0]}"
                )
        except Exception as error:
            return f"{path} cannot be read: {_told(error)}"
        try:
            self._gyre_reload(_tensors(Path(path)))
        except Exception as error:
            before, self._gyre_folder = self._gyre_folder, ""
            if not before:
                return f"torn: {_told(error)}"
            try:
                self._gyre_reload(_tensors(Path(before)))
            except Exception as second:
                return f"torn: {_told(error)}; {before}: {_told(second)}"
            self._gyre_folder = before
            return _told(error)
        self._gyre_folder = path
        return ""

    def _gyre_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=tensors)
        if self.model_runner.device.type == "cpu":
            _pack_tied(self.model_runner.get_model())

    def _gyre_made(self) -> dict[str, int]:
        """The number of tokens made by now, by id of each request that the engine runs. vLLM puts eight random
        characters behind an id."""
        return {
            name.rpartition("-")[0]: len(one.output_token_ids)
            for name, one in self.model_runner.requests.items()
        }


def _pack_tied(model: torch.nn.Module) -> None:
    """A CPU multiplies by packed copies of weights. vLLM packs anew what it loads; an output layer that is tied to the
    embedding is in no checkpoint, and would go on with the copy of before."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _shapes(folder: Path, tied: bool) -> dict[str, list[int]]:
    """By name of each tensor in the folder that models load: without older files' buffers, and without a tied output
    layer. None where it has no weights."""
    found: dict[str, list[int]] = {}
    for file in _files(folder):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return {
        name: shape
        for name, shape in found.items()
        if "rotary_emb.inv_freq" not in name and not (tied and name == "lm_head.weight")
    }


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def _draw_by_position(runner: Any) -> None:
    """Have the runner's sampler draw by seed and position, and tell log-probs at the draw's temperature."""
    sampler = runner.sampler
    vllms = sampler.sample
    sampler.logprobs_mode = "processed_logprobs"  # those that `sample` returns; the raw ones are not computed
    dice: dict[int, torch.Generator] = {}

    def generators() -> dict[int, torch.Generator]:
        batch, found = runner.input_batch, {}
        for index, name in enumerate(batch.req_ids):
            params = runner.requests[name].sampling_params
            seed = (params.extra_args or {}).get(SEED) if params is not None else None
            if seed is not None:
                if index not in dice:
                    dice[index] = torch.Generator(device=runner.device)
                dice[index].manual_seed(_mixed(seed, int(batch.num_tokens_no_spec[index])))
                found[index] = dice[index]
        return found

    def sample(
        logits: torch.Tensor, metadata: Any, mode: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        told = None
        if metadata.max_num_logprobs is not None:
            told = logits.float()
            if metadata.temperature is not None:
                heat = metadata.temperature.unsqueeze(1)
                told = told / torch.where(heat < _COLDEST, 1.0, heat)
            told = told.log_softmax(dim=-1)
        if not metadata.all_greedy:
            metadata = replace(metadata, generators=generators())
        drawn, _ = vllms(logits, metadata, "raw_logprobs")
        return drawn, told

    sampler.sample = sample


def _mixed(seed: int, position: int) -> int:
    """63 bits that depend on both. Neighbours among seeds would draw alike."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
