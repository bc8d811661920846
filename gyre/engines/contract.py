"""What Gyre asks of a running engine, as a type.

An engine is a process that serves SGLang's HTTP dialect (`gyre.engines.dialect`), and `EngineClient` is how Gyre talks
to it. The methods here are what every engine must serve; `gyre.testing.contracts.check_engine` tests one. What only
some engines have (loading by tensors, giving memory back, checksums) is not among them.

What holds for every call:
- *loop*: a client belongs to one event loop. Any number of calls may be open at once, on one engine from any number of
  clients;
- *deadline*: none is asked to wait longer than its `Deadlines` say;
- *a bad request harms nobody*: it is refused, and what else is running goes on.

This module must not know about HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from gyre.engines.dialect import EngineInfo, EngineLoad, GenerateRequest, PauseMode, StreamChunk


class Engine(Protocol):
    """A running engine, as its client sees it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        """The next tokens of one sample in disjoint chunks, each token with its log-prob at the sampling temperature
        under the weights that drew it; the last chunk, and no other, has a `finish`.

        Equal seeds and positions draw equal tokens from equal weights, in whatever batch and from whatever prefix, so
        that a sample may go on elsewhere from its last token. A stop token ends the sample and belongs to it. While the
        engine is paused a request waits. Closing the stream ends the request. Raises EngineRefused for a prompt, a
        token or a parameter that is impossible, and the engine lives on.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End a request: its stream ends with what it has and the finish `abort`. An unknown one is no error."""
        ...

    async def abort_all(self) -> None:
        """End every request, running and waiting."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens when this returns; what becomes of running requests is the mode's. No token that was
        drawn is lost or drawn again."""
        ...

    async def resume(self) -> None:
        """Go on. No error where nothing is paused."""
        ...

    async def update_weights_from_disk(self, path: Path | str, version: str, *, flush_cache: bool) -> None:
        """Serve the weights in the folder `path`, in Hugging Face's layout, as `version`.

        Paused `in_place` with requests open it is done under them, and `flush_cache` is False: their further tokens are
        the new version's, and their last chunk tells the spans, or each: then no label is provisional. Otherwise it
        waits for them. The second time it is loaded again. Raises EngineRefused where it cannot be loaded;
        the old weights are served on.
        """
        ...

    async def flush_cache(self) -> None:
        """Forget cached prefixes, when nothing runs. Raises EngineRefused while something does."""
        ...

    async def load(self) -> EngineLoad:
        """How full it is, a few steps late at most."""
        ...

    async def info(self) -> EngineInfo:
        """Who it is. Answers also while it is paused."""
        ...

    async def is_ready(self) -> bool:
        """Whether it draws tokens now. False while it loads and while it is paused. Raises nothing."""
        ...
