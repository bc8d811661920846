"""`python -m gyre.engines.embedded --model-path DIR --port N`: serve a model until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

from gyre.engines.embedded import KEY_VARIABLE
from gyre.errors import ConfigError

_SHUTDOWN_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after SIGTERM or SIGINT, 2 for a model that cannot be served."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(arguments))
    except (ConfigError, OSError) as error:
        print(f"The engine cannot start: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return value

    parser = argparse.ArgumentParser(
        prog="python -m gyre.engines.embedded",
        description="Serve a causal language model on CPU, in SGLang's HTTP dialect.",
    )
    parser.add_argument("--model-path", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one and prints it")
    parser.add_argument("--max-running-requests", type=positive, default=64)
    parser.add_argument("--max-total-tokens", type=positive, help="prompt and new tokens of all that run")
    parser.add_argument("--context-length", type=positive, help="at most the model's max_position_embeddings")
    parser.add_argument(
        "--chunked-prefill-size", type=positive, default=256, help="prompt tokens in one step"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=positive, default=1, help="more than 1 gives up bit-equality")
    parser.add_argument("--stream-interval", type=positive, default=1, help="tokens in a stream's chunk")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--seed", type=int, default=0, help="for requests without a sampling_seed")
    parser.add_argument(
        "--api-key",
        default=os.environ.pop(KEY_VARIABLE, None),  # its children have no use for it
        help=f"asked for as Authorization: Bearer KEY; better in {KEY_VARIABLE}, which other users cannot read",
    )
    parser.add_argument(
        "--enable-deterministic-inference",
        action="store_true",
        help="accepted for SGLang's sake; it is always on with --threads 1, for models of Gyre's own decoder",
    )
    parser.add_argument(
        "--enable-lora", action="store_true", help="take adapters; transformers then computes"
    )
    parser.add_argument("--max-lora-rank", type=positive, help="largest rank of an adapter")
    parser.add_argument(
        "--lora-target-modules",
        nargs="+",
        default=["all"],
        help="last parts of the names of layers that adapters may change, or all",
    )
    return parser


async def _serve(arguments: argparse.Namespace) -> None:
    # Before torch is imported, for the threads that read checkpoints; and that is here, so --help needs no torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    from aiohttp import web

    from gyre.engines.embedded.http_server import EngineServer, EngineSettings

    given = vars(arguments)
    del given["enable_deterministic_inference"]
    server = EngineServer(EngineSettings(**given))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, arguments.host, arguments.port)
        await site.start()
        port = runner.addresses[0][1]
        gc.collect()
        gc.freeze()  # full collections pass over what there is now: torch, and the model
        print(f"The embedded engine is ready on http://{arguments.host}:{port}", flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
