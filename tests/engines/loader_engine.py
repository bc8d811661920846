"""An engine of one tensor table: Gyre's real weight loader, as SGLang calls it, behind the part of SGLang's HTTP
dialect that loads weights. Started as SGLang is, with the loader's folder on PYTHONPATH.

    python loader_engine.py --model-path DIR --port N --say DIR [--no-sessions]

`--no-sessions`: it knows no `/begin_weight_update`, as SGLang 0.5.17. Files in the folder `--say`: `tear` makes the
model fail half-way through its next load, `refuse` makes it refuse folders whose name the file holds, `no_flush` makes
it refuse the next flush. `requests` are those that its scheduler has: `{"running": {id: tokens}, "waiting": ...,
"under_way": ...}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gyre_weight_loader  # from PYTHONPATH
import torch
from aiohttp import web
from safetensors.torch import load_file


class Model(torch.nn.Module):
    def __init__(self, folder: str, say: Path) -> None:
        super().__init__()
        self.say = say
        self.table = torch.nn.ParameterDict(
            {
                name.replace(".", "/"): tensor
                for name, tensor in load_file(f"{folder}/model.safetensors").items()
            }
        )
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tear = (self.say / "tear").exists()
        (self.say / "tear").unlink(missing_ok=True)
        for count, (name, tensor) in enumerate(weights):
            if tear and count == 3:
                raise RuntimeError("half-way")
            self.table[name.replace(".", "/")].copy_(tensor)


class Scheduler:
    """What a loader looks at of SGLang's; the class of the same name has it by the same names in 0.5.17 and 0.5.23."""

    def __init__(self, requests: dict[str, dict[str, int]]) -> None:
        def some(which: str) -> list[Any]:
            told = requests.get(which, {})
            return [SimpleNamespace(rid=rid, output_ids=list(range(made))) for rid, made in told.items()]

        under_way = SimpleNamespace(reqs=some("under_way"))
        self.running_batch = SimpleNamespace(reqs=some("running"))
        self.last_batch, self.waiting_queue, self.chunked_req = under_way, some("waiting"), None
        self.result_queue = [(under_way, None)]

    def update(self, model: Model) -> None:
        gyre_weight_loader.load(model, [])


class Engine:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.say = asked, Path(asked.say)
        self.model = Model(asked.model_path, self.say)
        self.version, self.in_session, self.paused = "1", False, False

    def log(self, what: str) -> None:
        with open(self.say / "log", "a") as file:
            file.write(what + "\n")

    async def post(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        path = request.path.removeprefix("/")
        self.log(path + (f" {body['mode']}" if "mode" in body else ""))
        match path:
            case "begin_weight_update" | "end_weight_update":
                if self.asked.no_sessions:
                    return web.json_response({"detail": "Not Found"}, status=404)
                self.in_session = path.startswith("begin")
            case "update_weights_from_tensor":
                if not self.asked.no_sessions and not self.in_session:
                    return web.json_response({"success": False, "message": "no session"}, status=400)
                assert body["load_format"] == "gyre_weight_loader.load"
                assert not body["flush_cache"]
                requests = self.say / "requests"
                if requests.exists():
                    Scheduler(json.loads(requests.read_text())).update(self.model)
                else:
                    gyre_weight_loader.load(self.model, [])
                return web.json_response({"success": True, "message": "Success"})
            case "update_weights_from_disk":
                refused = self.say / "refuse"
                if refused.exists() and Path(body["model_path"]).name in refused.read_text().split():
                    return web.json_response({"success": False, "message": "no good"}, status=400)
                self.model.load_weights(load_file(body["model_path"] + "/model.safetensors").items())
                self.version = body["weight_version"]
            case "update_weight_version":
                assert body["abort_all_requests"] is False
                self.version = body["new_version"]
            case "flush_cache":
                once = self.say / "no_flush"
                if once.exists():
                    once.unlink()
                    return web.Response(status=400, text="pending requests")
        return web.json_response({"success": True, "message": "ok"})

    async def get(self, _: web.Request) -> web.Response:
        sums = {name: zlib.crc32(value.numpy().tobytes()) for name, value in self.model.table.items()}
        return web.json_response(
            {
                "model_path": self.asked.model_path,
                "weight_version": self.version,
                "version": "0",
                "context_length": 64,
                "sums": sums,
            }
        )


async def main(asked: argparse.Namespace) -> None:
    engine = Engine(asked)
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", engine.get), web.post("/{path:.*}", engine.post)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, asked.host, asked.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--say", required=True)
    parser.add_argument("--no-sessions", action="store_true")
    asyncio.run(main(parser.parse_args()))
