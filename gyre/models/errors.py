"""What this room raises.

    ConfigError
    └── ModelFolderError   a model's folder cannot be read, or is not the model that is wanted
        └── NotComputed    it is a model, and not one that Gyre's own decoder computes

This module must not import torch.
"""

from __future__ import annotations

from gyre.errors import ConfigError


class ModelFolderError(ConfigError):
    code = "config.model_folder"
    http_status = 400


class NotComputed(ModelFolderError):
    """Whoever computes by transformers may take the model."""


class NoSmallCopy(ConfigError):
    """Nothing can be tried on a small model of this kind."""

    code = "models.no_small_copy"
