"""How frames travel: as msgpack, each as the array `[kind, body]` in one binary WebSocket message.

A body is decoded straight into the struct of its kind, with its bounds: nothing is built of what does not belong there.
What is not a frame of the protocol raises FrameError, which has a code and names the field.

This module must not know about sockets or what the frames bring about.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import KINDS, Frame
from gyre.rollouts.protocol.progress import GenerationProgress, Report, ReportBody, body_of

MAX_FRAME_BYTES = 64 << 20
"""Of one frame: 16,384 samples that each bring 250 tokens fit; nobody can make the manager allocate more."""

PROGRESS = "progress"

_Frame = TypeVar("_Frame", bound=Frame)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def _model(kind: type[Any], value: Any) -> Any:
    """Raises ValueError, which becomes a refusal."""
    if issubclass(kind, BaseModel):
        return kind.model_validate(value, strict=True)
    raise NotImplementedError(f"{kind.__name__} has no wire form")


_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_REPORT = msgspec.msgpack.Decoder(ReportBody)
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(cls, dec_hook=_model) for kind, cls in KINDS.items()
}


def encode(frame: Frame | GenerationProgress) -> bytes:
    if isinstance(frame, GenerationProgress):
        return _ENCODER.encode([PROGRESS, body_of(frame)])
    return _ENCODER.encode([_KIND_OF[type(frame)], frame])


def decode(data: bytes) -> Frame | GenerationProgress:
    """Raises FrameError for whatever is not a frame of this protocol."""
    frame = unpack(data)
    return frame.unfold() if isinstance(frame, Report) else frame


def unpack(data: bytes) -> Frame | Report:
    """As `decode`, but a GenerationProgress comes as a Report, whose columns are yet to be checked."""
    if len(data) > MAX_FRAME_BYTES:
        raise refuse("oversized", f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are taken")
    kind = "frame"
    try:
        kind, body = _ENVELOPE.decode(data)
        if kind == PROGRESS:
            return _REPORT.decode(body).report()
        decoder = _DECODERS.get(kind)
        if decoder is None:
            raise refuse("unknown_kind", f"a frame of the unknown kind {kind!r:.60}")
        return decoder.decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise _refusal(kind, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse("malformed", f"{len(data)} bytes that are no frame: {error!r}"[:500]) from None


def checked(cls: type[_Frame], **fields: Any) -> _Frame:
    """A frame of this kind. Raises FrameError where a field is not what the protocol permits."""
    try:
        return msgspec.convert(fields, cls, dec_hook=_model)
    except (msgspec.ValidationError, TypeError) as error:
        raise refuse("invalid", f"{_KIND_OF[cls]}: {error}"[:500]) from None


def _refusal(kind: str, error: msgspec.ValidationError) -> Exception:
    text = str(error)
    what, _, where = text.rpartition(" - at `$")
    if kind == "frame":
        return refuse("unknown_kind" if where == "[0]`" else "malformed", f"no [kind, body]: {text}"[:500])
    if not what and text.startswith(("Expected `object`", "Expected `array`")):
        return refuse("malformed", f"the body of a {kind} frame: {text}"[:500])
    return refuse("invalid", f"{kind}{where.rstrip('`')}: {what or text}"[:500])
