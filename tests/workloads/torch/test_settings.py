"""Settings: defaults in one place, and a typo that names its path and the nearest known key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gyre.errors import ConfigError
from gyre.workloads.torch.settings import TorchSettings


def test_other_workloads_keys_are_left_to_them():
    assert TorchSettings.read({"my_dataset": {"path": "x"}}) == TorchSettings()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model": {"hiden": 8}}, r"config\.model\.hiden is not a setting.*'hidden'"),
        ({"modle": {}}, r"config\.modle is not a setting.*'model'"),
        ({"seed": "1"}, r"config\.seed must be int"),
        ({"seed": True}, r"config\.seed must be int"),
        ({"optim": {"lr": "fast"}}, r"config\.optim\.lr must be float"),
        ({"sampling": 3}, r"config\.sampling must be a mapping"),
        ({"task": {"operators": "/"}}, "operators"),
        ({"model": {"heads": 5}}, "even multiple"),
        ({"model": {"heads": 4, "kv_heads": 3, "hidden": 32}}, "multiple of model.kv_heads"),
        ({"loss": {"loss_agg_mode": "mean"}}, "loss_agg_mode"),
    ],
)
def test_a_wrong_setting_is_named(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TorchSettings.read(config)


def test_an_integer_is_a_fine_float():
    assert TorchSettings.read({"optim": {"lr": 1}}).optim.lr == 1.0


def test_settings_task_rewards_and_manifests_do_not_import_torch():
    modules = (
        "gyre.workloads.torch.settings, gyre.workloads.tasks.arithmetic, gyre.workloads.rewards, gyre.weights"
    )
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_may_be_absent_is_a_number_or_nothing():
    for given, read in ((0, 0.0), (-1.5, -1.5), (None, None)):
        assert TorchSettings.read({"reward": {"stuck_score": given}}).reward.stuck_score == read
    for wrong in ("0", True):
        with pytest.raises(ConfigError, match=r"config\.reward\.stuck_score must be float"):
            TorchSettings.read({"reward": {"stuck_score": wrong}})
