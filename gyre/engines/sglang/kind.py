"""SGLang as a record."""

from __future__ import annotations

from gyre.engines.kind import EngineKind, MemoryWords
from gyre.models.architecture import Architecture


def _unfit(architecture: Architecture) -> str:
    return "mlp_bias is true, and SGLang's Llama has no biases in its MLP" if architecture.mlp_bias else ""


SGLANG = EngineKind(
    "sglang",
    "SGLang",
    "gyre.engines.sglang.command:command",
    package="sglang",
    install="pip install 'gyre-rl[sglang]'",
    requires=">=0.5.17",
    min_p_by_seed=False,
    loads_from="memory",
    memory=MemoryWords(
        ("--tp", "--tp-size", "--tensor-parallel-size"),
        "--mem-fraction-static",
        ("--dtype", "--quantization", "--kv-cache-dtype"),
    ),
    lacks=frozenset(("mlp_bias",)),
    unfit=_unfit,
)
