"""What the manager says to HTTP clients that it refuses, in one form: `code` and `message`, and OpenAI's `error`, which
its clients read.

This module must not know why something is refused.
"""

from __future__ import annotations

from typing import Any

from gyre.request_body import error_body

_ELSEWHERE = {
    "/v1/embeddings": "A fleet generates alone.",
    "/v1/moderations": "A fleet generates alone.",
    "/tokenize": "Take the tokenizer of the model's folder.",
    "/detokenize": "Take the tokenizer of the model's folder.",
    "/update_weights_from_disk": "POST /v1/policies publishes a version.",
    "/update_weights_from_tensor": "POST /v1/policies publishes a version.",
    "/update_weights_from_distributed": "POST /v1/policies publishes a version.",
    "/init_weights_update_group": "POST /v1/policies publishes a version.",
    "/pause_generation": "rollouts.update_mode says what becomes of samples when a version comes.",
    "/continue_generation": "rollouts.update_mode says what becomes of samples when a version comes.",
    "/flush_cache": "Instances flush their caches with each version.",
    "/release_memory_occupation": "gyre scale says how many instances there are.",
    "/resume_memory_occupation": "gyre scale says how many instances there are.",
    "/get_model_info": "GET /v1/models says what is served.",
    "/model_info": "GET /v1/models says what is served.",
    "/get_server_info": "GET /v1/models says what is served.",
    "/server_info": "GET /v1/models says what is served.",
    "/health_generate": "GET /health is 200 while an instance serves.",
    "/get_load": "GET /v1/loads counts the requests.",
    "/metrics": "The master has /metrics for Prometheus.",
}
"""What others' servers have and the door has not, with what to do."""


def no_such_route(method: str, path: str, allowed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Of a path that is not there, or not for this method."""
    if allowed:
        return error_body(
            405, "method_not_allowed", f"{path} takes {', '.join(sorted(allowed))}, not {method[:20]}."
        )
    hint = _ELSEWHERE.get(path.rstrip("/"), "docs/fleet.md lists what there is.")
    return error_body(404, "not_found", f"There is no {path[:200]} here. {hint}")
