"""The page's table has every key below `config.fsdp`, and the error of a device names the right section."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.config.sections import FsdpSettings, MegatronSettings
from gyre.errors import ConfigError
from gyre.workloads.learner.devices import device_of
from tests.test_docs import table_under

PAGE = Path(__file__).parents[2] / "docs" / "fsdp.md"


def test_the_page_has_every_key_with_its_default() -> None:
    rows = table_under(PAGE, "## Settings")
    assert sorted(rows) == sorted(FsdpSettings.model_fields)
    for name, cells in rows.items():
        default = getattr(FsdpSettings(), name)
        assert cells[1].strip("`") == (str(default).lower() if isinstance(default, bool) else str(default))


@pytest.mark.parametrize(
    ("settings", "section"),
    [(FsdpSettings(device="cuda"), "fsdp"), (MegatronSettings(device="cuda"), "megatron")],
)
def test_a_device_that_is_not_there_names_its_section(
    settings: FsdpSettings | MegatronSettings, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"config\.{section}\.device is cuda"):
        device_of(settings)
