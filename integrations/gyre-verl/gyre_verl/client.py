"""verl's client of its LLM servers, which asks a fleet's door."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gyre_verl.door import Door, request_id


class GyreClient(LLMServerClient):
    """`base` is the fleet's version of verl's step 0; `since` is the version that this run began with: older ones are
    another run's, and none of their tokens is taken."""

    def __init__(self, config: Any, door: Door, *, base: int, since: int) -> None:
        super().__init__(config=config)
        self._door, self._base, self._since = door, base, since
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        """It is pickled into each of verl's agent loops, which open a session of their own."""
        return {**self.__dict__, "_session": None, "_loop": None}

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> TokenOutput:
        """One turn. It survives the death of engines, instances and the manager: see `Door.generate`."""
        if image_data or video_data or audio_data:
            raise ValueError("a Gyre fleet serves text alone: the prompt has images, video or audio")
        body = self._body(request_id, normalize_token_ids(prompt_ids), sampling_params)
        session = self._session_here()
        told = await self._door.generate(session, body)
        await self._door.forget(session, body["rid"])
        return self._output(told)

    def _session_here(self) -> Any:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            timeout = aiohttp.ClientTimeout(total=self._door.patience_s)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
            self._loop = loop
        return self._session

    def _body(self, trajectory: str, prompt_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        rollout = self.config.actor_rollout_ref.rollout
        most = params.get("max_tokens", params.get("max_new_tokens", rollout.response_length))
        if float(params.get("repetition_penalty", 1.0)) != 1.0:
            raise ValueError("a Gyre fleet has no repetition_penalty: set it to 1.0")
        sampling = {
            "max_new_tokens": int(most),
            "temperature": float(params.get("temperature", 1.0)),
            "top_p": float(params.get("top_p", 1.0)),
            "top_k": int(params.get("top_k", -1)),
            "ignore_eos": bool(rollout.get("ignore_eos", False)),
        }
        return {
            "rid": request_id(trajectory, prompt_ids),
            "input_ids": list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "policy": {"at_least": self._since},
        }

    def _output(self, told: dict[str, Any]) -> TokenOutput:
        meta = told["meta_info"]
        runs = [(version - self._base, start, end) for version, start, end in meta["policy_versions"]]
        steps = [step for step, _, _ in runs] or [self._since - self._base]
        return TokenOutput(
            token_ids=told["output_ids"],
            log_probs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
            stop_reason="completed",
            num_preempted=0,
            extra_fields={
                "global_steps": max(steps),
                "min_global_steps": min(steps),
                "max_global_steps": max(steps),
                "policy_versions": runs,
            },
        )
