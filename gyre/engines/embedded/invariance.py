"""Why a token's bits do not depend on its neighbours, and the check of it when an engine starts.

Invariant *batch invariance*: what a row of a step computes is a function of its own tokens and the weights, bit by
bit: whoever else is in the batch, whichever slot it has, and whether its tokens were prefilled or decoded.

How it is reached, on one thread:
- norms, activations and softmax work row by row. For them there is nothing to do;
- a matrix product of 4 rows or more gives each row the same bits whatever the number of rows is. With 1 to 3 rows
  MKL takes another kernel. So products are padded to 4 rows;
- attention always has one token as its query (prefill too: its tokens are rows of a batch whose keys have
  stride 0), so each row's products have one shape but for the number of keys. Keys beyond a row's own are masked;
  they add zeros at the end of each sum, which changes nothing unless the number of keys changes how the sum is cut
  into blocks. Keys come in blocks of 512; within one, MKL's product of 4 rows and more cuts at 192 < keys < 384 in
  the middle, elsewhere at 192 or not at all. `KeyLengths` knows the numbers of keys that are cut alike.

All of this is how libraries behave, not what they promise. So `measure` looks, on this machine and for this model's
shapes, and takes the cheapest scheme that holds; the last ones hold by construction.

This module must not know about requests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 512
"""Keys in one block of torch's CPU attention."""

_FEWEST_ROWS = 4
_PROBED_ROWS = (4, 5, 6, 7, 8, 11, 16, 29, 32, 48, 64)
_PROBED_KEYS = 1280


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """Which numbers of keys attention is asked for.

    `fine`: multiples of 16. `blocked`: of those, the ones that MKL cuts alike. `whole`: multiples of `step`.
    """

    name: str
    step: int = 16

    def covering(self, length: int) -> int:
        """The smallest number of keys that is at least `length`; it never falls as `length` grows."""
        rounded = -(-length // self.step) * self.step
        if self.name == "blocked":
            full, rest = divmod(rounded, _BLOCK)
            if 192 < rest < 384:
                return full * _BLOCK + 384
        return rounded


@dataclass(frozen=True, slots=True)
class Scheme:
    """`fewest_rows`: what a matrix product is padded to. `proven`: whether the cheap scheme was seen to hold."""

    fewest_rows: int
    key_lengths: KeyLengths


def measure(
    matrices: Iterable[tuple[Tensor, Tensor | None]],
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    most_rows: int,
    context_length: int,
) -> Scheme:
    """The cheapest scheme that holds here. `matrices`: the weights `[out, in]` with their biases, one of each shape.

    `most_rows` is the most that a step can have; a step that is always padded to it holds whatever a library does.
    """
    generator = torch.Generator().manual_seed(0)
    rows = all(_rows_agree(weight, bias, most_rows, generator) for weight, bias in matrices)
    candidates = [KeyLengths("blocked"), KeyLengths("whole", _BLOCK)]
    if group < _FEWEST_ROWS:  # of more rows MKL is known to cut
        candidates.insert(0, KeyLengths("fine"))
    keys = next(
        (lengths for lengths in candidates if _keys_agree(lengths, group, kv_heads, head_dim)),
        KeyLengths("whole", -(-context_length // _BLOCK) * _BLOCK),
    )
    return Scheme(_FEWEST_ROWS if rows else most_rows, keys)


def _rows_agree(weight: Tensor, bias: Tensor | None, most_rows: int, generator: torch.Generator) -> bool:
    x = torch.randn(max(most_rows, max(_PROBED_ROWS)), weight.shape[1], generator=generator).to(weight.dtype)
    together = F.linear(x, weight, bias)
    return all(torch.equal(F.linear(x[-rows:], weight, bias), together[-rows:]) for rows in _PROBED_ROWS)


@functools.cache
def _keys_agree(lengths: KeyLengths, group: int, kv_heads: int, head_dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    asked = sorted({lengths.covering(length) for length in range(1, _PROBED_KEYS, 16)})
    shape = (5, min(kv_heads, 2), asked[-1], head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    queries = torch.randn(5, shape[1], group, head_dim, generator=generator)
    for length in asked:
        last = [
            max(0, min(length - 1, length - back)) for back in (1, 17, length // 4, length // 2, length - 7)
        ]
        short = _attend(queries, keys, values, last, length)
        if not torch.equal(short, _attend(queries, keys, values, last, asked[-1])):
            return False
        alone = _attend(queries[2:3], keys[2:3], values[2:3], last[2:3], length)
        if not torch.equal(short[2:3], alone):
            return False
    return True


def _attend(queries: Tensor, keys: Tensor, values: Tensor, last: Sequence[int], length: int) -> Tensor:
    return attend(queries, keys[:, :, :length], values[:, :, :length], mask_of(torch.tensor(last), length))


def mask_of(positions: Tensor, length: int) -> Tensor:
    """What is added to scores, `[rows, 1, 1, length]`: 0 up to and at int64 `positions` `[rows]`, beyond it -inf."""
    beyond = torch.arange(length) > positions[:, None]
    return torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One token a row: `queries` `[rows, kv_heads, group, d]`, `keys` and `values` `[rows, kv_heads, length, d]`.

    The heads of a group stand where torch expects the tokens of a query: nothing is repeated for them. Returns
    `[rows, kv_heads, group, d]`.
    """
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
