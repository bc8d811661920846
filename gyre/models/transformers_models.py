"""Which models transformers brings as causal language models: what FSDP2 trains beyond what Gyre's own decoder knows.

Invariant *not imported*: importing transformers takes seconds, and torch with it; its table of models is read as text.

This module must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gyre.models.config_keys import flag, refuse_no_decoder
from gyre.models.errors import ModelFolderError

_TABLE = Path("models", "auto", "modeling_auto.py")
_CAUSAL = re.compile(
    r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\s*\[(.*?)^\s*\]", re.MULTILINE | re.DOTALL
)
_ENTRY = re.compile(r'^\s*\(\s*"([^"]+)"', re.MULTILINE)


@cache
def causal_types() -> frozenset[str] | None:
    """The values of `model_type`; none where the table is not where it was; None where transformers is not
    installed."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return None
    try:
        table = _CAUSAL.search((Path(found.origin).parent / _TABLE).read_text(encoding="utf-8"))
    except OSError:
        return frozenset()
    return frozenset(_ENTRY.findall(table[1])) if table else frozenset()


def refuse_not_causal(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError where the content of a `config.json`, which `where` names, is of no causal language model
    of transformers, or of one that cannot be trained: its weights are quantized, it reads images, it has an encoder.
    What only transformers itself can tell is not refused here."""
    refuse_no_decoder(config, where)
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
