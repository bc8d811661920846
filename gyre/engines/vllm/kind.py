"""vLLM as a record."""

from __future__ import annotations

from gyre.engines.kind import EngineKind

VLLM = EngineKind(
    "vllm",
    "vLLM",
    "gyre.engines.vllm.command:vllm_command",
    package="vllm",
    install="pip install 'vllm==0.32.0'",
    requires="==0.32.0",
    shares_device=False,
    loads_from="memory",
)
