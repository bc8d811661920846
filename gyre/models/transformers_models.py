"""Which models transformers brings as causal language models: what FSDP2 trains beyond what Gyre's own decoder knows.

Invariant *not imported*: importing transformers takes seconds, and torch with it; its tables are read as text.

This module must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gyre.models.config_keys import AS_SAVED, flag, refuse_no_decoder, refuse_no_dtype
from gyre.models.errors import ModelFolderError

_TABLE, _ROPE_TABLE = Path("models", "auto", "modeling_auto.py"), Path("modeling_rope_utils.py")
_CAUSAL = re.compile(
    r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\s*\[(.*?)^\s*\]", re.MULTILINE | re.DOTALL
)
_ENTRY = re.compile(r'^\s*\(\s*"([^"]+)"', re.MULTILINE)
_ROPES = re.compile(r"^ROPE_INIT_FUNCTIONS\b[^{]*\{(.*?)^\}", re.MULTILINE | re.DOTALL)
_ROPE = re.compile(r'^\s*"([^"]+)":', re.MULTILINE)
_OTHER_ROPES = ("default", "mrope", "su")
"""Kinds of rotary positions that transformers computes without a row in its table, or knows by another name."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@cache
def causal_types() -> frozenset[str] | None:
    """The values of `model_type`; none where the table is not where it was; None where transformers is not
    installed."""
    return _names_in(_TABLE, _CAUSAL, _ENTRY)


@cache
def rope_types() -> frozenset[str] | None:
    """The kinds of rotary positions; none and None as for `causal_types`."""
    found = _names_in(_ROPE_TABLE, _ROPES, _ROPE)
    return found | set(_OTHER_ROPES) if found else found


def _names_in(file: Path, table: re.Pattern[str], name: re.Pattern[str]) -> frozenset[str] | None:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    try:
        found = table.search((Path(package.origin).parent / file).read_text(encoding="utf-8"))
    except OSError:
        return frozenset()
    return frozenset(name.findall(found[1])) if found else frozenset()


def refuse_not_causal(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError where the content of a `config.json`, which `where` names, is of no causal language model
    of transformers, or of one that cannot be trained: its weights are quantized, it reads images, it has an encoder.
    What only transformers itself can tell is not refused here."""
    refuse_no_decoder(config, where)
    refuse_no_dtype(config, where)
    kind, types = config.get("model_type"), causal_types()
    if types is None:
        raise ModelFolderError(
            f"{where}: model_type {kind!r} is one for transformers, which is not installed.",
            hint="pip install 'gyre-rl[fsdp]'.",
        )
    if flag(config, "is_encoder_decoder", where):
        raise ModelFolderError(
            f"{where}: is_encoder_decoder is true: a model with an encoder is not trained.",
            hint="Take a causal language model.",
        )
    if types and kind not in types:
        raise ModelFolderError(
            f"{where}: model_type {kind!r} is no causal language model of the installed transformers.",
            hint="A newer transformers may have it. Code that a folder brings is not run.",
        )
    flag(config, "tie_word_embeddings", where)
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelFolderError(
                f"{where}: {key} must be a positive integer, not {value!r}.", hint=AS_SAVED
            )
    for key in ("rope_parameters", "rope_scaling"):
        _refuse_rope(config.get(key), f"{where}: {key}")


def _refuse_rope(given: Any, where: str) -> None:
    """Raises ModelFolderError for rotary positions of a kind that transformers does not compute. Those of layers of
    several kinds stand by the names of the kinds."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ModelFolderError(f"{where} must be an object, not {given!r}.", hint=AS_SAVED)
    types = rope_types()
    for one in (given, *(value for value in given.values() if isinstance(value, Mapping))):
        kind = one.get("rope_type", one.get("type"))
        if types and kind is not None and kind not in types:
            raise ModelFolderError(
                f"{where}: rope type {kind!r} is none of the installed transformers.",
                hint=f"It computes {', '.join(sorted(types))}. A newer one may have it.",
            )
