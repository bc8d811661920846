"""One of each kind that a user may bring, as small as its contract allows."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gyre.engines.process import EngineCommand
from gyre.graph import RECIPES, Backend, Recipe
from gyre.rollouts.samples import Group, Sample

# -- a loss and an advantage ----------------------------------------------------------------------------


def squared(
    logprobs: Any, advantages: Any, mask: Any, settings: Any, *, scale: float = 1.0, **given: Any
) -> Any:
    from gyre.workloads.algorithms.losses import aggregate

    per_token = scale * (logprobs - advantages).square()
    shape = {name: given[name] for name in ("rows", "norm_length")}
    return aggregate(per_token, mask, settings.loss_agg_mode, {"gap": per_token}, **shape)


squared.metrics = ("gap",)  # type: ignore[attr-defined]


def by_length(group: Group, rewards: Any, *, per_token: bool = False) -> list[Any]:
    lengths = [len(sample.token_ids) for sample in group.samples]
    return [np.arange(n) if per_token else float(n) for n in lengths]


def too_few(group: Group, rewards: Any) -> list[float]:
    return [1.0]


# -- a recipe and a back end ------------------------------------------------------------------------------

RECIPE = Recipe(
    name="mine",
    required=RECIPES["grpo"].required,
    optional=RECIPES["grpo"].optional,
    build=RECIPES["grpo"].build,
    loss={"loss_mode": f"{__name__}:squared"},
)

BACKEND = Backend(
    classes={
        "actor": "my.training:Actor",
        "critic": "my.training:Critic",
        "reference": "my.training:Reference",
    },
    reads_model=frozenset({"reference"}),
)


# -- a task -----------------------------------------------------------------------------------------------


class Letters:
    """Prompts of one letter each; the answer is that letter."""

    def __init__(self, config: dict[str, Any], *, letters: str = "abc") -> None:
        from gyre.workloads.tasks.arithmetic import CharTokenizer

        self.letters = letters
        self.tokenizer = CharTokenizer(letters)
        self.stop_token_ids = (self.tokenizer.eos_id,)

    def prompt(self, index: int) -> Group:
        letter = self.letters[index % len(self.letters)]
        return Group(id=index, prompt_ids=self.tokenizer.encode(letter), meta={"answer": letter})

    def held_out(self, count: int) -> list[Group]:
        return [
            Group(
                id=-1 - k, prompt_ids=self.tokenizer.encode(self.letters[0]), meta={"answer": self.letters[0]}
            )
            for k in range(count)
        ]

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids)

    def answer_of(self, sample: Sample) -> str:
        return self.tokenizer.decode(sample.token_ids)


# -- an engine --------------------------------------------------------------------------------------------


def engine(
    folder: Path, *, version: str, max_running: int, kv_tokens: int, python: str, extra: list[str]
) -> EngineCommand:
    """The embedded engine, started by hand: any server that speaks its dialect would do."""
    argv = [python or sys.executable, "-m", "gyre.engines.embedded", "--model-path", str(folder)]
    argv += ["--host", "{host}", "--port", "{port}", "--weight-version", version]
    argv += ["--max-running-requests", str(max_running), "--max-total-tokens", str(kv_tokens)]
    return EngineCommand((*argv, *extra))


def no_engine(folder: Path, **_: Any) -> str:
    return "python -m my_engine"


# -- a codec ----------------------------------------------------------------------------------------------


class Deflate:
    def encode(self, raw: memoryview, *, word: int) -> bytes:
        return zlib.compress(raw, 1)

    def decode(self, data: memoryview, into: memoryview, *, word: int) -> None:
        inflater = zlib.decompressobj()
        found = inflater.decompress(data, len(into))
        if len(found) != len(into) or inflater.unconsumed_tail:
            raise ValueError("it has another size")
        into[:] = found


class Broken(Deflate):
    def encode(self, raw: memoryview, *, word: int) -> bytes:
        raise RuntimeError("no")


# -- a sink -----------------------------------------------------------------------------------------------


class Silent:
    def __init__(self, job: Any, *, prefix: str = "") -> None:
        self.prefix = prefix

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None: ...

    def evaluation(self, evaluation: Any) -> None: ...

    def warning(self, warning: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class HalfTold(Silent):
    def incident(self, incident: Any) -> None: ...


class Deaf:
    def __init__(self, job: Any) -> None: ...


deflate = Deflate()
broken = Broken()
