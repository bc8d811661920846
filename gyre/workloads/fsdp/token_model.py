"""A causal model of transformers as a function of packed tokens: what it says of each predicted token.

Sequences of a pass are told apart by `packed_attention`, or else by position ids that restart; no attention mask is
given: with one, even of ones, transformers lets each sequence see its neighbours.

Invariant *no more logits than are asked for*: hidden states are selected before the output layer.

This module must not know about shards or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import MoeModelOutputWithPast

from gyre.errors import ConfigError
from gyre.workloads.fsdp import packed_attention
from gyre.workloads.fsdp.logprobs import head_logprobs, logits_logprobs

UNPACKED = ("sdpa", "eager")
"""Transformers' own implementations of attention, in the order in which they are tried."""

Says = Literal["tokens", "hidden", "tokens by all logits"]


class TokenModel(nn.Module):
    """`causal` with its own output layer, or with `values` a value head instead of it.

    `own_masks`: the model is given a mask for each type of its layers, for it does not make them of position ids.
    `selects`: hidden states are selected before the output layer; else the logits of all tokens are computed.
    """

    causal: Any

    def __init__(self, causal: nn.Module, *, values: bool) -> None:
        super().__init__()
        self.causal = causal
        self.values = values
        self.own_masks = False
        self.base: str = self.causal.base_model_prefix
        self.selects = True
        if not hasattr(causal, self.base) or self.causal.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(causal).__name__} of transformers is no decoder with an output layer.",
                hint="FSDP2 trains causal language models.",
            )
        text = self.causal.config.get_text_config()
        self.vocab = int(text.vocab_size)
        if values:
            self.value_head = nn.Linear(int(text.hidden_size), 1)
            self.causal.set_output_embeddings(nn.Identity())

    @property
    def attends_by_segments(self) -> bool:
        """Whether attention is `packed_attention`."""
        return bool(self.causal.config._attn_implementation == packed_attention.NAME)

    def attend_by_segments(self) -> None:
        """Take `packed_attention`."""
        self.causal.set_attn_implementation(packed_attention.NAME)

    def attend_otherwise(self) -> None:
        """Take transformers' own attention. Raises ValueError where the model has none."""
        for one in UNPACKED:
            try:
                self.causal.set_attn_implementation(one)
            except ValueError:
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
        scale: float = 1.0,
        entropy_gradient: bool = False,
        says: Says = "tokens",
    ) -> tuple[Tensor, Tensor]:
        """Of a pass (see `Pass`): log-probs of the targets where logits are multiplied by `scale`, and entropies, or
        values and zeros; float32 `[n]` each. For a check also the hidden states `[n, hidden]` before the output layer,
        and log-probs without what `selects` saves."""
        inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
        }
        if self.attends_by_segments:
            inputs["segments"] = packed_attention.Segments.of(lengths, tokens.device)
        if self.own_masks:
            inputs["attention_mask"] = self._masks(inputs["position_ids"])
        if says == "tokens by all logits" or not (self.selects or says == "hidden"):
            logits = self.causal(**inputs).logits[0].index_select(0, columns)
            return logits_logprobs(logits, targets, scale=scale, entropy_gradient=entropy_gradient)
        hidden = getattr(self.causal, self.base)(**inputs).last_hidden_state[0].index_select(0, columns)
        if says == "hidden":
            return hidden, torch.zeros_like(targets)
        if self.values:
            values = self.value_head(hidden).float()[:, 0]
            return values, torch.zeros_like(values)
        return head_logprobs(
            self._logits,
            list(self.causal.get_output_embeddings().parameters()),
            hidden,
            targets,
            vocab=self.vocab,
            scale=scale,
            entropy_gradient=entropy_gradient,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        """By the model's own forward, which may scale or cap what its output layer gives."""
        with self._hidden_given(hidden):
            ignored = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            logits: Tensor = self.causal(input_ids=ignored, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _hidden_given(self, hidden: Tensor) -> Iterator[None]:
        base = getattr(self.causal, self.base)
        base.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden[None])
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
