"""The tensors of a folder in Hugging Face's layout, in one safetensors file or several.

Invariant *all of it or none*: `require` compares names, shapes and dtypes with an architecture before any tensor is
read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import (
    ANOTHER_MODEL,
    TensorEntry,
    other_head,
    refuse_narrow,
    require_tensors,
    weight_files,
)
from gyre.models.tensor_names import EMBEDDING, HEAD

TensorSource = Callable[[str], Tensor]
"""Gives a whole tensor by its Hugging Face name."""


class SafetensorsFolder:
    """`source(name)` gives a tensor of the folder. The headers are read at once, a tensor when it is asked for.

    Raises ModelFolderError for a file that is absent or cannot be read, and for an adapter where a model is meant:
    without `adapter`."""

    def __init__(self, folder: Path, *, adapter: bool = False) -> None:
        self._folder = folder
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        self._files: dict[Path, Any] = {}
        for path, entries in weight_files(folder, adapter=adapter).items():
            self._entries |= {entry.name: (path, entry) for entry in entries}

    def __bool__(self) -> bool:
        """Whether it holds weights."""
        return bool(self._entries)

    @property
    def names(self) -> frozenset[str]:
        """Of its tensors."""
        return frozenset(self._entries)

    def require(self, architecture: Architecture, *, head: str | None = HEAD) -> None:
        """Raises ModelFolderError unless it holds all tensors of the architecture, each of its shape, and no others. It
        reads none of them, but for an output layer beside the embedding that it is tied to. `head` is the output layer
        that is wanted; None takes any."""
        held = {name: entry for name, (_, entry) in self._entries.items()}
        require_tensors(held, architecture, self._folder, head=head)
        if head == HEAD and architecture.tied and HEAD in self._entries:
            self._refuse_other_head()

    def _refuse_other_head(self) -> None:
        """Raises ModelFolderError where a tied model has an output layer of its own after all."""
        head, embedding = self(HEAD), self(EMBEDDING)
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            raise other_head(self._folder)

    def __call__(self, name: str) -> Tensor:
        """The tensor; it may be a view of the file. Raises ModelFolderError where there is none of this name, and for
        one that is quantized."""
        if name not in self._entries:
            raise ModelFolderError(f"there is no tensor {name} in {self._folder}.", hint=ANOTHER_MODEL)
        path, entry = self._entries[name]
        refuse_narrow(entry, self._folder)
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._files[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(
                f"{path}: {name} cannot be read: {error}.", hint="Is it whole? Copy or download it again."
            ) from None
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: self(name) for name in self._entries}
