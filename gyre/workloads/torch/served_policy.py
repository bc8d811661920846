"""A policy that is being served: the model and the version whose bytes it holds, swapped as one.

Invariants:
- *no old weights served as new*: weights are taken only when their bytes match their manifest, and only when
  their version is not older than the one being served;
- *all or nothing*: a load that fails leaves the served policy as it was.

This module must not know what the policy is used for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gyre.models.architecture import Architecture
from gyre.models.modules import Decoder
from gyre.weights.version.manifest import WeightManifest, WeightMismatch, unpack_weights
from gyre.workloads.learner.errors import OlderWeights


@dataclass(frozen=True, slots=True)
class Policy:
    """Never changed in place: a new version is a new `Policy`."""

    model: Decoder
    manifest: WeightManifest

    @property
    def version(self) -> int:
        return self.manifest.version


def next_policy(
    architecture: Architecture, served: Policy | None, manifest: WeightManifest, buffer: bytes
) -> Policy:
    """The policy to serve after `buffer` arrived; `served` itself when it is the same version again.

    Raises OlderWeights for a version below the served one, and WeightMismatch when the bytes are not the
    manifest's, when they do not fit the model, or when one version came with two different contents.
    """
    if served is not None:
        if manifest.version < served.version:
            raise OlderWeights(
                f"version {manifest.version} came while version {served.version} is served.",
                hint="Publish a version above it.",
            )
        if manifest.version == served.version:
            if manifest.checksum != served.manifest.checksum:
                raise WeightMismatch(
                    f"version {manifest.version} came with checksum {manifest.checksum}, "
                    f"but is served with {served.manifest.checksum}.",
                    hint="A version names one set of weights: publish the other under a new number.",
                )
            return served
    tensors = unpack_weights(manifest, buffer)
    model = Decoder(architecture)
    load_parameters(model, tensors)
    return Policy(model.eval().requires_grad_(False), manifest)


@torch.no_grad()
def load_parameters(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model's parameters. Raises WeightMismatch before any copy if they do not fit."""
    parameters = dict(model.named_parameters())
    missing, extra = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or extra:
        raise WeightMismatch(f"the weights are not this model's: missing {missing}, unknown {extra}.")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape or parameter.dtype != tensors[name].dtype:
            raise WeightMismatch(
                f"tensor {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, "
                f"the model's is {parameter.dtype} {tuple(parameter.shape)}.",
                hint="Give both sides the same model settings.",
            )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
