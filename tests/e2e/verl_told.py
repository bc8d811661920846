"""What verl's processes ask of the door, and what they are answered, written down: verl loads this in each of them,
beside `gyre_verl.testing.cpu`. One object of JSON a line, in a file for each process in `GYRE_VERL_TOLD`.

It is no record of Gyre's or verl's own, but a second pair of eyes, at the last call that is verl's side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre_verl.door import Door

_generate = Door.generate


def _write(**fields: Any) -> None:
    with (Path(os.environ["GYRE_VERL_TOLD"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


async def _told(door: Door, session: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    _write(asked=body["rid"])
    answer = await _generate(door, session, body)
    _write(answered=body["rid"], token_ids=answer["output_ids"])
    return answer


Door.generate = _told  # type: ignore[method-assign]
