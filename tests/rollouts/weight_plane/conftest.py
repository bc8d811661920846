"""A trainer and an instance for each test, of which no file is left at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.config import WeightsSpec
from tests.rollouts.weight_plane.far_instance import Far, Make


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Make]:
    made: list[Far] = []

    def make(
        theirs: WeightsSpec | None = None,
        *,
        gives_up_s: float = 30.0,
        imports: str = "",
        has_engine: bool = False,
        **settings: Any,
    ) -> Far:
        plane = WeightsSpec(**settings)
        made.append(
            Far(tmp_path, plane, theirs, gives_up_s=gives_up_s, imports=imports, has_engine=has_engine)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
