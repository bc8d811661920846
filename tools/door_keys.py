"""docs/fleet-keys.md, from the tables by which the door reads a request: `python tools/door_keys.py` writes it."""

from __future__ import annotations

from pathlib import Path

from gyre.request_body import ANYTHING, Key, json_text
from gyre.rollouts.manager.door.keys import TABLES

PAGE = Path(__file__).parent.parent / "docs" / "fleet-keys.md"

_HEAD = """# Keys at the door

What becomes of each key of a request to a [fleet's door](fleet.md). Null is as if the key were left out. A key that
would change what is drawn or told, and that is not there, is refused by its name (`unsupported`), and so is one that no
table has. It passes at the values that change nothing, and at no other: `false` and `0` are values.
"""


def page() -> str:
    """The page, of the tables as they are: keys of one fate, with the same to say of them, share a row."""
    parts = [_HEAD]
    for keys in TABLES:
        rows: dict[tuple[str, str], list[str]] = {}
        for key in keys.rows.values():
            rows.setdefault((_fate(key), key.says), []).append(f"`{key.name}`")
        parts.append(f"\n## In {keys.of}\n\n| keys | | |\n| --- | --- | --- |\n")
        parts += [f"| {', '.join(names)} | {fate} | {says} |\n" for (fate, says), names in rows.items()]
    return "".join(parts)


def _fate(key: Key) -> str:
    if key.is_taken:
        return "taken"
    if ANYTHING in key.passes:
        return "passes"
    if key.passes:
        return "passes at " + ", ".join(f"`{json_text(one)}`" for one in key.passes)
    return "refused"


if __name__ == "__main__":
    PAGE.write_text(page())
