"""Whether data and models speak of the same tokens: they are compared by what their tokenizers contain, not by size.

Prompts are numbers. Under another tokenizer they are another text, and nothing fails. So the tokenizer with which the
prompts were prepared, that of the model which is trained, and that of whoever reads the model's answers (a reference, a
reward model) must be one. `plan` compares them where the folders are on its machine, and each vertex where it reads its
own. An engine is given tokens and gives tokens, and loads no tokenizer; so a machine that joins has none to compare.

This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.config.sections import DataSettings, WorkloadSettings, read_section
from gyre.data.folder import MANIFEST, PreparedFolder
from gyre.data.prepared import PreparedData
from gyre.data.tokenizer import tokenizer_identity
from gyre.errors import ConfigError


def refuse_other_tokenizer(config: Mapping[str, Any], folder: Path, key: str) -> None:
    """Raises ConfigError, which names `key`, where the tokenizer in the model's `folder` is another one than that of
    the job's data or of the model that the job trains. What is not on this machine, or has no tokenizer, is not
    compared."""
    own = tokenizer_identity(folder)
    if not own:
        return
    for what, name, theirs in _tokenizers(config):
        if theirs and theirs != own:
            raise ConfigError(
                f"{key}: the tokenizer in {folder} is not that of {name} ({what}): their tokens stand for other texts.",
                hint=f"Prepare the data with `gyre data prepare … --tokenizer {folder}`."
                if what == "config.data" and key == "config.model_path"
                else "Take a model with the tokenizer of the policy.",
            )


def refuse_other_tokens(config: Mapping[str, Any], vocab: int, folder: Path) -> None:
    """Raises ConfigError where the prompts hold a token that the model in this folder, of `vocab` tokens, does not
    have."""
    if _data_here(config) is None:
        return
    largest = PreparedData(config).largest_token
    if largest >= vocab:
        raise ConfigError(
            f"config.data: the prompts hold token {largest}, the model in {folder} has {vocab} tokens.",
            hint="Prepare the data with the tokenizer of that model.",
        )


def _tokenizers(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Setting, folder and tokenizer's identity of the job's data and of its model, as far as they are here."""
    found = []
    path = _data_here(config)
    if path is not None:
        found.append(("config.data", str(path), str(PreparedFolder(path).manifest["tokenizer"])))
    model = WorkloadSettings.read(config).model_path
    if model:
        found.append(("config.model_path", model, tokenizer_identity(model)))
    return found


def _data_here(config: Mapping[str, Any]) -> Path | None:
    """The folder of the job's data set, if it has one that is on this machine."""
    if "data" not in config:
        return None
    path = Path(read_section(DataSettings, config, "data").path)
    return path if (path / MANIFEST).is_file() else None
