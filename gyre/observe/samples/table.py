"""Groups as a table of Parquet: one row a sample. docs/samples.md says what each column means.

Invariants:
- *as it was trained*: tokens are int32, log-probs float32 and rewards float64, as they are in the ledger, bit for bit;
- *whatever comes*: what a column cannot hold (log-probs of another length, a reward that is no number) is null there,
  and keeps no other column from being written.

This module imports pyarrow, so it is imported where a file is made or read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from gyre.observe.samples.names import QUARANTINED, TRAINED
from gyre.observe.samples.texts import Texts, as_text
from gyre.rollouts.drawn import at_drawn, of_drawn
from gyre.rollouts.samples import MORE, OLD_LOGPROBS, Group, Sample
from gyre.rollouts.session_extras import (
    ENGINE_S,
    OUTCOME,
    REASON,
    SESSION,
    TOOL_S,
    TURNS,
    number_of,
    row_turns,
)

FORMAT = "1"

MOST_META = 1 << 16
"""Characters of a prompt's meta that are kept whole; beyond, each value is cut."""
_CUT_VALUE = 200

_RUN = [("start", pa.int32()), ("end", pa.int32())]
_TURN = [
    ("turn", pa.int32()),
    ("start", pa.int32()),
    ("drawn", pa.int32()),
    ("end", pa.int32()),
    ("waited_s", pa.float64()),
]
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        ("rollout", pa.int32()),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("quarantined", pa.bool_(), nullable=False),
        ("reward", pa.float64()),
        ("more", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float32()),
        ("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        ("versions", pa.list_(pa.struct([("version", pa.int32()), *_RUN]))),
        ("instances", pa.list_(pa.struct([("name", pa.string()), *_RUN]))),
        ("drawn", pa.list_(pa.struct(_RUN))),
        ("turns", pa.list_(pa.struct(_TURN))),
        ("session_outcome", pa.string()),
        ("session_reason", pa.string()),
        ("session_turns", pa.int32()),
        ("tool_s", pa.float64()),
        ("engine_s", pa.float64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_pieces", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float32())),
        ("trainer_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),
        ("meta", pa.string()),
        ("extras", pa.string()),
    ]
)

_TOKEN_EXTRAS = {"trainer_logprobs": OLD_LOGPROBS, "ref_logprobs": "ref_logprobs", "values": "values"}
"""Columns of one number a token, by the key of a sample's extras that has them."""

TEXTS = (
    "outcome",
    "session_outcome",
    "session_reason",
    "finish_reason",
    "prompt",
    "answer",
    "meta",
    "extras",
)
"""Columns whose values repeat and are long: each different one is written once."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A group as it is kept. `outcome` is `trained`, or why it was not; `evidence` says more of that."""

    group: Group
    outcome: str = TRAINED
    evidence: str = ""


Advantages = Callable[[Sequence[Group]], Sequence[Sequence[NDArray[np.float32]] | None]]
"""Of each sample of each group float32 `[t]`, as the loss has them; None for a group where that is not known."""


def table_of(
    step: int,
    observed: Iterable[Observed],
    texts: Texts,
    advantages: Advantages,
    logprobs: Mapping[tuple[int, int], NDArray[np.float32]] = MappingProxyType({}),
) -> pa.Table:
    """A row for each sample, in the order of groups; of a group without samples one, whose sample is 0. `logprobs` are
    the trainer's own of the drawn tokens of trained samples, by group and sample, as far as they are known."""
    of = list(observed)
    rows = [row for one in of for row in _rows_of(one)]
    tokens = [_ids(row.sample.token_ids) for row in rows]
    arrays = {
        **_of_groups(step, of, texts),
        **_of_samples(rows, tokens, texts, advantages),
        **_of_tokens(rows, tokens, texts, logprobs),
    }
    schema = SCHEMA.with_metadata(
        {
            "gyre.format": FORMAT,
            "gyre.step": str(step),
            "gyre.groups": str(len({one.group.id for one in of})),
        }
    )
    return pa.table([arrays[name] for name in SCHEMA.names], schema=schema)


@dataclass(slots=True)  # frozen ones take three times as long to make, and a step has thousands
class _Row:
    of: Observed
    index: int
    sample: Sample
    finish_reason: str | None


def _rows_of(observed: Observed) -> Iterator[_Row]:
    for index, sample in enumerate(observed.group.samples):
        yield _Row(observed, index, sample, as_text(sample.finish_reason))
    if not observed.group.samples:
        nothing = Sample(np.empty(0, np.int32), np.empty(0, np.float32), ())
        yield _Row(observed, 0, nothing, None)


def _of_groups(step: int, of: Sequence[Observed], texts: Texts) -> dict[str, pa.Array]:
    """What is one group's is made once, and stands in the rows of all its samples."""
    prompt_ids = [_ids(one.group.prompt_ids) for one in of]
    columns: dict[str, Any] = {
        "step": [step] * len(of),
        "group": [one.group.id for one in of],
        "outcome": [one.outcome for one in of],
        "quarantined": [one.outcome == QUARANTINED for one in of],
        "prompt_tokens": [len(ids) for ids in prompt_ids],
        "prompt": [texts.prompt(one.group) for one in of],
        "meta": [_meta(one) for one in of],
    }
    once = _arrays(columns)
    once["prompt_ids"] = _lists(prompt_ids, np.int32, pa.int32())
    once["prompt_pieces"] = _piece_lists(prompt_ids, texts)
    places = pa.array(np.repeat(np.arange(len(of)), [len(one.group.samples) or 1 for one in of]))
    return {name: values.take(places) for name, values in once.items()}


def _of_samples(
    rows: Sequence[_Row], tokens: Sequence[NDArray[np.int32]], texts: Texts, advantages: Advantages
) -> dict[str, pa.Array]:
    samples = [row.sample for row in rows]
    columns: dict[str, Any] = {
        "sample": [row.index for row in rows],
        "rollout": [sample.rollout for sample in samples],
        "reward": [_number(sample.reward) for sample in samples],
        "more": [_more(sample) for sample in samples],
        "advantage": _advantages(rows, advantages),
        "finish_reason": [row.finish_reason for row in rows],
        "tokens": [len(ids) for ids in tokens],
        "drawn": [_drawn(sample) for sample in samples],
        **_of_sessions(samples),
        "answer": [texts.answer(sample) if len(sample.token_ids) else "" for sample in samples],
        "extras": [_extras(sample) for sample in samples],
    }
    versions = [sample.versions for sample in samples]
    instances = [sample.instances for sample in samples]
    return {
        **_arrays(columns),
        "versions": _run_lists("versions", versions, lambda run: run.version),
        "instances": _run_lists("instances", instances, lambda run: as_text(run.name)),
    }


def _of_sessions(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What rows of sessions say of these; null in other rows."""
    found: dict[str, list[Any]] = {"turns": [_turns(sample) for sample in samples]}
    for column, key in (("session_outcome", OUTCOME), ("session_reason", REASON)):
        told = [sample.extras.get(key) for sample in samples]
        found[column] = [None if value is None else as_text(value) for value in told]
    counts = [sample.extras.get(TURNS) for sample in samples]
    found["session_turns"] = [one if _is_count(one) else None for one in counts]
    for column, key in (("tool_s", TOOL_S), ("engine_s", ENGINE_S)):
        found[column] = [number_of(sample.extras, key) for sample in samples]
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _turns(sample: Sample) -> list[dict[str, Any]] | None:
    """None too where anybody made something else of what was there."""
    turns = row_turns(sample)
    places = [place for turn in turns for place in turn[:4]]
    if not turns or not all(map(_is_count, places)):
        return None
    return [
        {
            "turn": turn.number + 1,
            "start": turn.start,
            "drawn": turn.drawn,
            "end": turn.end,
            "waited_s": _number(turn.waited_s),
        }
        for turn in turns
    ]


def _of_tokens(
    rows: Sequence[_Row],
    tokens: Sequence[NDArray[np.int32]],
    texts: Texts,
    logprobs: Mapping[tuple[int, int], NDArray[np.float32]],
) -> dict[str, pa.Array]:
    """Of each row a list with a value for each token."""
    columns: dict[str, list[Any]] = {"logprobs": [row.sample.logprobs for row in rows]}
    for name, key in _TOKEN_EXTRAS.items():
        columns[name] = [row.sample.extras.get(key) for row in rows]
        if key == OLD_LOGPROBS:
            columns[name] = [
                _trainers(row, logprobs, old) if row.of.outcome == TRAINED else old
                for row, old in zip(rows, columns[name], strict=True)
            ]
    arrays = {
        "token_ids": _lists(tokens, np.int32, pa.int32()),
        "pieces": _piece_lists(tokens, texts),
    }
    for name, of_rows in columns.items():
        found = [_floats(values, len(ids)) for values, ids in zip(of_rows, tokens, strict=True)]
        arrays[name] = _lists(found, np.float32, pa.float32())
    return arrays


def _trainers(row: _Row, logprobs: Mapping[tuple[int, int], NDArray[np.float32]], old: Any) -> Any:
    """The trainer's own log-probs of a sample, 0 where a token was not drawn: of drawn tokens among `logprobs`, or
    `old`."""
    found = logprobs.get((row.of.group.id, row.index))
    if found is None:
        return old
    return at_drawn(row.sample, found) if len(found) == row.sample.drawn else found


def _arrays(columns: Mapping[str, Any]) -> dict[str, pa.Array]:
    return {name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()}


def _advantages(rows: Sequence[_Row], advantages: Advantages) -> list[float | None]:
    """Of each trained sample the mean over its tokens; they are all the same but with a critic."""
    trained = {id(row.of.group): row.of.group for row in rows if row.of.outcome == TRAINED}
    known = dict(zip(trained, advantages(list(trained.values())), strict=True))
    found: list[float | None] = [None] * len(rows)
    places: list[int] = []
    of_places: list[NDArray[np.float32]] = []
    for place, row in enumerate(rows):
        of_group = known.get(id(row.of.group)) if row.of.outcome == TRAINED else None
        if of_group is not None and row.sample.drawn:
            places.append(place)
            of_places.append(of_drawn(row.sample, of_group[row.index]))
    for place, value in zip(places, _means(of_places), strict=True):
        found[place] = value
    return found


def _means(rows: Sequence[NDArray[np.float32]]) -> list[float]:
    """Of each row its mean, or the very value that all of it has; none is empty."""
    if not rows:
        return []
    joined = np.concatenate(rows)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    first = joined[starts]
    # The two are equal where all are, and never where one is NaN.
    same = np.minimum.reduceat(joined, starts) == np.maximum.reduceat(joined, starts)
    return [
        one if alike else float(row.mean(dtype=np.float64))
        for row, one, alike in zip(rows, first.tolist(), same.tolist(), strict=True)
    ]


def _number(value: Any) -> float | None:
    """The value as a float, NaN included; None where it is no number."""
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value)
    return None


def _drawn(sample: Sample) -> list[dict[str, int]] | None:
    """The runs of tokens that were drawn; None where all were."""
    if sample.mask is None:
        return None
    edges = np.flatnonzero(np.diff(np.concatenate(([False], sample.mask, [False])).astype(np.int8))).tolist()
    return [{"start": start, "end": end} for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _more(sample: Sample) -> list[tuple[str, float | None]]:
    return [
        (as_text(key[len(MORE) :]), _number(value))
        for key, value in sample.extras.items()
        if isinstance(key, str) and key.startswith(MORE)
    ]


def _extras(sample: Sample) -> str | None:
    """What else operators added, as JSON; arrays of tokens are left out, and what has columns of its own."""
    rest = {
        key: value
        for key, value in sample.extras.items()
        if not (isinstance(key, str) and key.startswith((MORE, SESSION)))
        and not isinstance(value, np.ndarray)
    }
    return _json(rest) if rest else None


def _meta(observed: Observed) -> str:
    meta = observed.group.meta
    return _json({**meta, "evidence": observed.evidence} if observed.evidence else meta)


def _json(values: dict[Any, Any]) -> str:
    """As JSON, numbers that are none as null; what JSON cannot hold as text."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        text = orjson.dumps(values, default=as_text, option=options).decode()
    except (TypeError, ValueError, RecursionError):  # text that is no text, a number beyond 64 bits, a circle
        return json.dumps({as_text(key): _short(value) for key, value in values.items()})
    if len(text) > MOST_META:
        return json.dumps({as_text(key): _short(value) for key, value in values.items()})
    return text


def _short(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return as_text(value if isinstance(value, str) else repr(value))[:_CUT_VALUE]


def _ids(values: Any) -> NDArray[np.int32]:
    """int32 `[t]`; none where it is no list of ids."""
    try:
        found = np.asarray(values)
        if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size):
            return found.astype(np.int32, copy=False)
    except (TypeError, ValueError, OverflowError):
        pass
    return np.empty(0, np.int32)


def _floats(values: Any, count: int) -> NDArray[np.float32] | None:
    """float32 `[count]`; None where there are not so many numbers."""
    if values is None:
        return None
    try:
        found = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        return None
    return found if found.shape == (count,) else None


def _lists(rows: Sequence[NDArray[Any] | None], dtype: Any, kind: pa.DataType) -> pa.Array:
    """A list for each row, null where it is None: one array of values and where each row ends, no object a token."""
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
    present = [row for row in rows if row is not None and len(row)]
    values = np.concatenate(present) if present else np.empty(0, dtype)
    return _list_array(
        offsets, pa.array(values.astype(dtype, copy=False), kind), [row is None for row in rows]
    )


def _run_lists(name: str, rows: Sequence[Sequence[Any]], what: Callable[[Any], Any]) -> pa.Array:
    """The runs of each row as structs: `what` a run is of, its start and its end."""
    lengths = np.cumsum([len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate(([0], lengths)).astype(np.int32)
    runs = [run for row in rows for run in row]
    kind = SCHEMA.field(name).type.value_type
    columns = [what(run) for run in runs], [run.start for run in runs], [run.end for run in runs]
    parts = [pa.array(column, field.type) for column, field in zip(columns, kind, strict=True)]
    structs = pa.StructArray.from_arrays(parts, fields=list(kind))
    return _list_array(offsets, structs, [False] * len(rows))


def _piece_lists(rows: Sequence[NDArray[np.int32]], texts: Texts) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))).astype(np.int32)
    ids = np.concatenate(rows) if rows else np.empty(0, np.int32)
    found = texts.pieces(ids)
    if found is None:
        return pa.nulls(len(rows), pa.list_(pa.string()))
    different, places = found
    values = pa.array(different, pa.string()).take(pa.array(places))
    return _list_array(offsets, values, [False] * len(rows))


def _list_array(offsets: NDArray[np.int32], values: pa.Array, is_null: Sequence[bool]) -> pa.Array:
    mask = pa.array(is_null) if any(is_null) else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=mask)
