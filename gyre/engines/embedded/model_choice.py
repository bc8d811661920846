"""Who computes a folder's model: Gyre's own decoder where it knows the model, else transformers, and transformers
always where adapters are wanted."""

from __future__ import annotations

from pathlib import Path

from gyre.engines.embedded.decoder_model import DecoderModel
from gyre.engines.embedded.served_model import ServedModel
from gyre.models.adapters import AdapterLimits
from gyre.models.architecture import read_architecture, read_config
from gyre.models.errors import ModelFolderError, NotComputed
from gyre.models.transformers_models import refuse_not_causal
from gyre.models.tried import problem_with


def served_model(folder: Path, adapters: AdapterLimits | None = None) -> ServedModel:
    """The folder's model, with `adapters` one that takes those. Raises ModelFolderError where nobody here serves it, or
    where transformers would and is not installed."""
    try:
        architecture = read_architecture(folder)
        if adapters is None:
            return DecoderModel(architecture)
    except NotComputed:
        pass
    config, where = read_config(folder), str(folder / "config.json")
    refuse_not_causal(config, where)
    if problem := problem_with(config, "embedded"):
        raise ModelFolderError(
            f"{where}: the embedded engine does not serve it: {problem}.", hint="Serve it with SGLang."
        )
    from gyre.engines.embedded.transformers_model import TransformersModel

    return TransformersModel(folder, adapters)
