"""What a process that is gone said last, as evidence: the end of its log, its engine's output included.

Invariants:
- *bounded*: at most `LINES` lines and `BYTES` bytes, for it goes into the journal;
- *nobody waits*: a folder that does not answer within `WITHIN_S` has no words; a death is told without them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.engines.last_words import clean
from gyre.logs.reading import last_lines
from gyre.master.cluster import Address

LINES = 20
BYTES = 4000
WITHIN_S = 2.0


async def last_words_of(logs: Path, address: Address) -> dict[str, str]:
    """`last_words`, the text of the last lines of the vertex's process; nothing where there are none."""
    try:
        async with asyncio.timeout(WITHIN_S):
            lines = await asyncio.to_thread(
                last_lines, logs, address.vertex, address.incarnation, lines=LINES, most_bytes=BYTES
            )
    except (OSError, TimeoutError):  # the evidence has what else is known
        return {}
    return {"last_words": clean("\n".join(lines))} if lines else {}
