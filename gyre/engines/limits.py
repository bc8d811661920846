"""Requests that an engine must never be sent: it would not refuse them but die, and every other sample with it.

SGLang 0.5.23 dies of two. A token id that the model has no embedding for ends its scheduler, and with it the server
(several tensor-parallel ranks take it for a token without meaning instead). `min_p` above 0 ends it in deterministic
inference, which is how Gyre starts it so that seeds count. Both are refused here, with RequestUnsafe, before they are
sent.

This module must not know which engine it is, or how a request is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.engines.dialect import GenerateRequest
from gyre.engines.errors import RequestUnsafe

UNKNOWN_RUNNING = 256
"""Samples at once, of an engine that was not asked yet."""

UNKNOWN_KV_TOKENS = 262_144
"""Tokens of KV memory, of an engine that was not asked yet."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`vocabulary`: token ids are below it; None where it is not known. `takes_min_p`: whether `min_p` may be set."""

    vocabulary: int | None = None
    takes_min_p: bool = True

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestUnsafe."""
        ids = request.input_ids
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or (self.vocabulary is not None and high >= self.vocabulary):
                raise RequestUnsafe(
                    f"Request {request.rid} holds token {low if low < 0 else high}, and the model has tokens "
                    f"0 to {(self.vocabulary or 1 << 31) - 1}.",
                    hint="Was it made with the tokenizer of this model?",
                    details={"reason": "token_out_of_vocabulary", "status": 400},
                )
        if request.sampling.min_p > 0 and not self.takes_min_p:
            raise RequestUnsafe(
                f"Request {request.rid} wants min_p {request.sampling.min_p:g}, which SGLang does not survive where "
                "seeds count.",
                hint="Set min_p to 0, or rollouts.deterministic to false.",
                details={"reason": "min_p_with_seeds", "status": 400},
            )
