"""A model's tensors by the names in its files, both ways.

Transformers keeps the experts of a layer in one tensor, and files have a tensor of each; some modules have other names
than in the files. Transformers converts when it loads and when it saves. Here its own conversions run on a few tensors
at a time, so that nobody needs the whole model.

Invariants:
- *as transformers saves it*: names and tensors are those that `save_pretrained` writes;
- *lossless*: what was joined is taken apart again bit by bit.

This module must not know about ranks or shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class TensorBundle:
    """Tensors that are converted together: the model's by its own names, and those in files with their shapes."""

    names: tuple[str, ...]
    files: dict[str, tuple[int, ...]]


class FileNames:
    """Of a `causal` model of transformers whose tensors are `shapes`, by the model's names for them."""

    def __init__(self, causal: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._causal = causal
        # A prefix that some folders have before every name is no part of a text model, and is not written.
        found = [
            one
            for one in get_model_conversion_mapping(self._causal, add_legacy=False)
            if not isinstance(one, PrefixChange)
        ]
        self._in = _Conversions.of(found)
        self._out = _Conversions.of([one.reverse_transform() for one in reversed(found)])
        self._wanted = set(shapes)
        together: dict[str, list[str]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            key, pattern = apply_converters(name, self._out.converters)
            together.setdefault(name if pattern is None else key, []).append(name)
        self.bundles = [self._bundle(names, shapes) for names in together.values()]

    def _bundle(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> TensorBundle:
        plain = {name: torch.empty(shapes[name], device="meta") for name in names}
        apart = self.apart(plain)
        return TensorBundle(tuple(names), {name: tuple(tensor.shape) for name, tensor in apart.items()})

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A bundle's tensors as they are in files; they may be views of those given."""
        pending: dict[str, Any] = {}
        for name, tensor in tensors.items():
            key, pattern = apply_converters(name, self._out.converters)
            if pattern is None:
                key, pattern = apply_renamings(name, self._out.renamings), name
                one: Any = pending.setdefault(key, WeightRenaming(name, key))
            else:
                one = pending.setdefault(key, deepcopy(self._out.by_pattern[pattern]))
            one.add_tensor(key, name, pattern, tensor)
        found: dict[str, Tensor] = {}
        for key, one in pending.items():
            for name, value in self._converted(one, key).items():
                is_converted = isinstance(one, WeightConverter)
                found[apply_renamings(name, self._out.renamings) if is_converted else name] = value
        return found

    def together(self, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `apart`. Raises KeyError for a tensor that is none of the model's."""
        pending: dict[str, Any] = {}
        for name, tensor in sorted(files.items(), key=lambda item: dot_natural_key(item[0])):
            key, pattern = rename_source_key(name, self._in.renamings, self._in.converters)
            if key not in self._wanted and name in self._wanted:  # as transformers does: it was no old name
                key, pattern = name, None
            if key not in self._wanted:
                raise KeyError(f"{name} of a file would be {key}, which the model does not have")
            if pattern is None:
                one: Any = pending.setdefault(key, WeightRenaming(name, key))
                pattern = name
            else:
                one = pending.setdefault(key, deepcopy(self._in.by_pattern[pattern]))
            one.add_tensor(key, name, pattern, tensor)
        found: dict[str, Tensor] = {}
        for key, one in pending.items():
            found |= self._converted(one, key)
        return found

    def _converted(self, conversion: Any, key: str) -> dict[str, Tensor]:
        done = conversion.convert(key, model=self._causal, config=self._causal.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in done.items()}


@dataclass(frozen=True, slots=True)
class _Conversions:
    renamings: list[Any]
    converters: list[Any]
    by_pattern: dict[str, Any]

    @staticmethod
    def of(found: Sequence[Any]) -> _Conversions:
        converters = [one for one in found if isinstance(one, WeightConverter)]
        return _Conversions(
            [one for one in found if isinstance(one, WeightRenaming)],
            converters,
            {pattern: one for one in converters for pattern in one.source_patterns},
        )
