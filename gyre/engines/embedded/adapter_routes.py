"""SGLang's routes for adapters: loaded beside those that serve, and dropped.

Invariants:
- *nothing pauses*: an adapter is read and checked in a thread of its own, and requests may name it from the next step
  on;
- *a failed load changes nothing*;
- *who uses it keeps it*: running requests end with the adapter that they name, also when it is dropped.

This module must not know about slots or tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web

from gyre.engines.embedded.core import EngineCore
from gyre.engines.embedded.errors import BadRequest
from gyre.engines.embedded.served_model import ServedModel
from gyre.models.errors import ModelFolderError

Ask = Callable[[Callable[[EngineCore], Any]], Awaitable[Any]]
"""Has the engine's loop call a function between two steps, and gives its result."""

Body = Callable[[web.Request], Awaitable[Any]]
"""Reads a request's JSON object. Raises BadRequest."""


class AdapterRoutes:
    def __init__(self, model: ServedModel, dtype: torch.dtype, ask: Ask, body: Body) -> None:
        self._model, self._dtype, self._ask, self._body = model, dtype, ask, body
        self._paths: dict[str, str] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/load_lora_adapter", self.load),
            web.post("/unload_lora_adapter", self.unload),
        ]

    async def load(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        name, path = body.get("lora_name"), body.get("lora_path")
        try:
            if not isinstance(name, str) or not name or not isinstance(path, str) or not path:
                raise BadRequest(
                    "load_lora_adapter needs lora_name, and lora_path, the folder of an adapter."
                )
            adapter = await asyncio.to_thread(self._model.load_adapter, Path(path), self._dtype)
            await self._ask(lambda core: core.add_adapter(name, adapter))
        except (ModelFolderError, BadRequest) as error:
            return self._answer(str(error))
        self._paths[name] = path
        return self._answer()

    async def unload(self, http: web.Request) -> web.StreamResponse:
        name = (await self._body(http)).get("lora_name")
        try:
            if not isinstance(name, str) or not name:
                raise BadRequest("unload_lora_adapter needs lora_name.")
            await self._ask(lambda core: core.drop_adapter(name))
        except BadRequest as error:
            return self._answer(str(error))
        self._paths.pop(name, None)
        return self._answer()

    def _answer(self, problem: str = "") -> web.Response:
        body = {"success": not problem, "error_message": problem, "loaded_adapters": self._paths}
        return web.Response(
            body=orjson.dumps(body), status=400 if problem else 200, content_type="application/json"
        )
