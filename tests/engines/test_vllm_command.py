"""How vLLM is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.engines.kind import EngineStart
from gyre.engines.sglang.command import LAUNCHER_KEY
from gyre.engines.vllm.command import SERVER, vllm_command
from gyre.engines.weight_loading import LOADER_KEY, LOADER_PATH
from gyre.errors import ConfigError
from gyre.models.adapters import AdapterLimits

START = EngineStart(Path("/m"), "7", "py", extra=("--tensor-parallel-size", "2"))


def test_the_command_is_gyres_server_by_vllms_python_with_the_users_arguments_last() -> None:
    command = vllm_command(START)
    assert command.argv[:3] == ("py", "-m", SERVER)
    assert command.argv[-2:] == ("--tensor-parallel-size", "2")
    assert (LOADER_PATH / f"{SERVER}.py").is_file()
    assert command.env["PYTHONPATH"].split(":")[0] == str(LOADER_PATH)
    assert "--by-seed" not in command.argv
    assert "--by-seed" in vllm_command(replace(START, deterministic=True)).argv


def test_its_keys_are_its_own_and_on_no_command_line() -> None:
    one, other = vllm_command(START), vllm_command(START)
    assert one.api_key == one.env[LAUNCHER_KEY] != other.api_key
    assert one.loader_key == one.env[LOADER_KEY] != other.loader_key
    assert not {one.api_key, one.loader_key} & {*one.argv}


def test_what_the_job_sets_is_said_in_vllms_words() -> None:
    argv = vllm_command(replace(START, max_running=32, context_length=4096)).argv
    assert argv[argv.index("--max-num-seqs") + 1] == "32"
    assert argv[argv.index("--max-model-len") + 1] == "4096"


@pytest.mark.parametrize(("rank", "started"), [(1, "8"), (8, "8"), (9, "16"), (600, "600")])
def test_an_adapters_rank_is_one_that_vllm_has(rank: int, started: str) -> None:
    command = vllm_command(replace(START, adapters=AdapterLimits(rank)))
    assert command.argv[command.argv.index("--max-lora-rank") + 1] == started
    assert command.loader_key == "", "it loads adapters alone"


@pytest.mark.parametrize("argument", ["--port", "--worker-extension-cls=mine.Worker", "--logprobs-mode"])
def test_an_argument_of_gyres_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        vllm_command(replace(START, extra=(argument,)))


def test_tokens_are_kept_within_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    assert vllm_command(replace(START, folder=tmp_path)).limits.vocabulary == 512
