"""A causal model of transformers as a function of packed tokens: what it says of each predicted token.

Sequences of a pass are told apart in one of several `Way`s. No attention mask is given unless by `masks`: with one,
even of ones, transformers lets each sequence see its neighbours.

Invariants:
- *no more logits than are asked for*: hidden states are selected before the output layer;
- *all that is trained gets its gradient*: what lies between the base model and the output layer too.

This module must not know about shards or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from gyre.errors import ConfigError
from gyre.workloads.fsdp import packed_attention
from gyre.workloads.fsdp.logprobs import head_logprobs, logits_logprobs

UNPACKED = ("sdpa", "eager")
"""Transformers' own implementations of attention, in the order in which they are tried."""

Says = Literal["tokens", "hidden"]

Way = Literal["segments", "positions", "masks", "alone"]
"""How sequences of a pass are told apart: by `packed_attention`; by position ids that restart; by these and a mask for
each type of layer; or not at all, for a pass is of one sequence, which the model is given as by anybody else."""

WAYS: tuple[Way, ...] = ("segments", "positions", "masks")
"""Those that pack, the fastest first."""


class TokenModel(nn.Module):
    """`causal` with its own output layer, or with `values` a value head instead of it.

    `way`: how sequences of a pass are told apart, which `take` changes.
    `keeps_paths`: the keys of a tree's paths are kept for the gradient, because layers are computed again anyway.
    `selects`: hidden states are selected before the output layer; else the logits of all tokens are computed.

    Raises ConfigError for a model without an output layer.
    """

    causal: Any

    def __init__(self, causal: nn.Module, *, values: bool) -> None:
        super().__init__()
        self.causal = causal
        self.values = values
        self._base = _base_name(causal)
        self.selects = True
        self.keeps_paths = True
        if not self._base or self.causal.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(causal).__name__} of transformers is no decoder with an output layer.",
                hint="FSDP2 trains causal language models.",
            )
        self.way: Way = (
            "segments" if self.causal.config._attn_implementation == packed_attention.NAME else "positions"
        )
        text = self.causal.config.get_text_config()
        self.vocab = int(text.vocab_size)
        self._answer: type[Any] | None = None
        """The class of what the base model answers with, once it has."""
        if values:
            self.value_head = nn.Linear(int(text.hidden_size), 1)
            self.causal.set_output_embeddings(nn.Identity())

    @property
    def base(self) -> Any:
        """The model without what computes logits of its hidden states."""
        return self.causal.get_submodule(self._base)

    def take(self, way: Way) -> None:
        """Tell sequences apart in this way. Raises ValueError where the model has no attention for it."""
        if way == "segments":
            self.causal.set_attn_implementation(packed_attention.NAME)
        elif self.causal.config._attn_implementation == packed_attention.NAME:
            self._attend_otherwise()
        self.way = way

    def _attend_otherwise(self) -> None:
        for one in UNPACKED:
            try:
                self.causal.set_attn_implementation(one)
            except ValueError:  # the model lacks it
                if one == UNPACKED[-1]:
                    raise
            else:
                return

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        columns: Tensor,
        targets: Tensor,
        *,
        lengths: Sequence[int],
        parents: Sequence[int] = (),
        scale: float = 1.0,
        entropy_gradient: bool = False,
        says: Says = "tokens",
    ) -> tuple[Tensor, Tensor]:
        """Of a pass (see `Pass`): log-probs of the targets where logits are multiplied by `scale`, and entropies, or
        values and zeros; float32 `[n]` each. For a check also the hidden states `[n, hidden]` before the output layer,
        and log-probs without what `selects` saves. Only `segments` knows nodes with `parents`."""
        inputs = self._inputs(tokens, positions, lengths, parents)
        if says == "tokens" and not (self.selects or self.values):
            logits = self.causal(**inputs).logits[0].index_select(0, columns)
            return logits_logprobs(logits, targets, scale=scale, entropy_gradient=entropy_gradient)
        answer = self.base(**inputs)
        self._answer = type(answer)
        hidden = answer.last_hidden_state[0].index_select(0, columns)
        if says == "hidden":
            return hidden, torch.zeros_like(targets)
        if self.values:
            values = self.value_head(hidden).float()[:, 0]
            return values, torch.zeros_like(values)
        return head_logprobs(
            self._logits,
            self._behind_base(),
            hidden,
            targets,
            vocab=self.vocab,
            scale=scale,
            entropy_gradient=entropy_gradient,
        )

    def _inputs(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], parents: Sequence[int]
    ) -> dict[str, Any]:
        assert not parents or self.way == "segments", "this way gives a node no keys but its own"
        inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        if self.way != "alone":
            inputs["position_ids"] = positions[None]
        if self.way == "segments":
            inputs["segments"] = packed_attention.Segments.of(
                lengths, tokens.device, parents, kept=self.keeps_paths
            )
        if self.way == "masks":
            inputs["attention_mask"] = self._masks(positions[None])
        return inputs

    def _behind_base(self) -> list[nn.Parameter]:
        """What computes logits of hidden states: parameters that are not the base model's, and the output layer's,
        which may be."""
        inner = {id(one) for one in self.base.parameters()}
        found = {id(one): one for one in self.causal.parameters() if id(one) not in inner}
        found |= {id(one): one for one in self.causal.get_output_embeddings().parameters()}
        return list(found.values())

    def _logits(self, hidden: Tensor) -> Tensor:
        """By the model's own forward, which may have layers before its output layer, and scale or cap what it gives."""
        with self._hidden_given(hidden):
            ignored = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            logits: Tensor = self.causal(input_ids=ignored, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _hidden_given(self, hidden: Tensor) -> Iterator[None]:
        base, answer = self.base, self._answer
        assert answer is not None, "hidden states are the base model's"
        base.forward = lambda *_, **__: answer(last_hidden_state=hidden[None])
        try:
            yield
        finally:
            del base.forward

    def _masks(self, positions: Tensor) -> Any:
        like = next(iter(self.causal.parameters()))
        width = torch.empty((1, positions.shape[1], 1), dtype=like.dtype, device=positions.device)
        return create_masks_for_generate(
            self.causal.config, width, attention_mask=None, past_key_values=None, position_ids=positions
        )


def _base_name(causal: nn.Module) -> str:
    """The name of the module whose hidden states the model's own forward makes logits of; "" where there is none."""
    name = str(getattr(causal, "base_model_prefix", ""))
    if not name or not isinstance(getattr(causal, name, None), nn.Module):
        inner = [key for key, one in causal.named_children() if isinstance(one, PreTrainedModel)]
        if len(inner) != 1:
            return ""
        name = inner[0]
    base = causal.get_submodule(name)
    if isinstance(getattr(base, "decoder", None), PreTrainedModel) and not hasattr(base, "encoder"):
        return f"{name}.decoder"  # OPT and BART ask it, not what is around it
    return name
