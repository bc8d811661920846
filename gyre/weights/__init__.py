"""The weight plane: versions and manifests of a policy's weights."""

from gyre.weights.version.manifest import (
    TensorSpec,
    WeightManifest,
    WeightMismatch,
    pack_weights,
    unpack_weights,
    verify,
)

__all__ = ["TensorSpec", "WeightManifest", "WeightMismatch", "pack_weights", "unpack_weights", "verify"]
