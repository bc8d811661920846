"""From command lines to the configuration of a job."""

from __future__ import annotations

import argparse
from typing import Any


def args_2_omega_conf(args: argparse.Namespace) -> Any:
    """The arguments as an OmegaConf mapping. Raises ModuleNotFoundError where OmegaConf is not installed."""
    from omegaconf import OmegaConf

    return OmegaConf.create(vars(args))


def omega_conf_2_args(conf: Any) -> argparse.Namespace:
    """The mapping's keys as arguments."""
    return argparse.Namespace(**conf)
