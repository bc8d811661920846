"""What `gyre plan` and a submission say of a job whose settings are wrong, missing or of files that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gyre.api.checks import check_class_sections, check_settings, runs_here
from gyre.api.cli import main
from gyre.api.submit import checked as submittable
from gyre.config import parse_job
from gyre.config.sections import Section
from gyre.data.prepare import prepare
from gyre.errors import ConfigError, GraphError
from gyre.graph import compile_job
from gyre.workloads import BaseWorkload
from tests.data.small import write_lines, write_tokenizer

MEGATRON = "gyre.workloads.megatron:MegatronActor"
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16}
SMALL: dict[str, Any] = {"task": {}, "model": SHAPE, "optim": {"lr": 1e-3}}


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "ray.is_initialized", lambda: False
    )  # this worker may have run the tests on a real cluster
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYRE_HOME", str(tmp_path / "home"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}
"""A model that is trained and served. Its folder has no weights, which `plan` notes."""


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"problem": f"What is ${n}+{n}$?", "answer": str(2 * n), "uuid": f"u{n}"} for n in range(8)]
    prepare(
        write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "data", write_tokenizer(tmp_path / "tokenizer")
    )
    return str(tmp_path / "data")


def job(config: dict[str, Any], recipe: str = "grpo", **keys: Any) -> dict[str, Any]:
    roles: dict[str, Any] = {"actor": {}, "rollout": {}, "reward": {}} | keys.pop("roles", {})
    return {"recipe": recipe, "roles": roles, "config": config, **keys}


def planned(tmp_path: Path, given: dict[str, Any], *options: str) -> Result:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(given))
    return CliRunner().invoke(main, ["plan", str(file), *options])


def checked(given: dict[str, Any], address: str | None = None) -> list[str]:
    spec = compile_job(parse_job(given)).spec
    found = check_settings(spec, here=runs_here(spec, address))
    return [each for each in found if not each.startswith("no held-out evaluation")]


def test_a_typo_below_config_is_one_sentence_and_no_process(tmp_path: Path) -> None:
    assert planned(tmp_path, job(SMALL)).exit_code == 0
    wrong = planned(tmp_path, job(SMALL), "--set", "config.sampling.temprature=1")
    assert wrong.exit_code == 2
    assert wrong.stdout.startswith("No: ")
    assert "config.sampling.temprature: unknown key; did you mean 'temperature'?" in wrong.stderr


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_submission_says_the_same_and_starts_nothing(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started for a job that cannot run")

    monkeypatch.setattr("gyre.api.ray_session._start_local", started)
    file = tmp_path / "job.json"
    for change, sentence in (
        ("config.optim.lr=fast", "config.optim.lr: 'fast' should be a valid number"),
        ("config.optim.lr=null", "config.optim.lr: is missing"),
        ("config.data.path=nowhere", "config.data.path: nowhere is no prepared data set"),
        (
            "config.loss.kl_loss_coef=0.1",
            "config.loss.kl_loss_coef: 0.1 given, but the job has no reference role",
        ),
    ):
        file.write_text(json.dumps(job(SMALL)))
        said = CliRunner().invoke(main, [verb, str(file), "--set", change])
        assert said.exit_code == 2, said.output
        (error,) = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
        assert sentence in error


@pytest.mark.parametrize(
    ("config", "role", "recipe", "sentence"),
    [
        (
            {"model": SHAPE, "optim": {"lr": 1.0}},
            None,
            "grpo",
            r"config\.data: is missing, so the job has no prompts",
        ),
        ({"task": {}, "model": SHAPE}, None, "grpo", r"config\.optim\.lr: is missing"),
        (
            {"task": {}, "optim": {"lr": 1.0}},
            None,
            "grpo",
            r"config\.model_path: is missing, so the actor has no model",
        ),
        (
            {"task": {}, "optim": {"lr": 1.0}},
            MEGATRON,
            "grpo",
            r"config\.model_path: is missing, so the actor has no model",
        ),
        (SMALL, None, "ppo", r"config\.critic\.optim\.lr: is missing.*1e-5"),
        (SMALL, MEGATRON, "ppo", r"config\.critic\.optim\.lr: is missing"),
    ],
)
def test_what_has_no_default_must_be_given(
    config: dict[str, Any], role: str | None, recipe: str, sentence: str
) -> None:
    roles: dict[str, Any] = {"actor": {"entrypoint": role}, **({"critic": {}} if recipe == "ppo" else {})}
    with pytest.raises(ConfigError, match=sentence):
        checked(job(config, recipe, roles=roles))


def test_a_model_from_a_folder_needs_a_learning_rate_of_actor_and_critic(model: str) -> None:
    roles = {"actor": {"entrypoint": MEGATRON}, "critic": {}}
    config = {"task": {}, "megatron": {"model_path": model}}
    with pytest.raises(ConfigError, match=r"config\.optim\.lr: is missing"):
        checked(job(config, "ppo", roles=roles))
    config["optim"] = {"lr": 1e-6}
    with pytest.raises(ConfigError, match=r"config\.critic\.optim\.lr: is missing"):
        checked(job(config, "ppo", roles=roles))
    config["critic"] = {"optim": {"lr": 1e-5}}
    (note,) = checked(job(config, "ppo", roles=roles))
    assert "holds no weights" in note


def test_classes_of_the_users_own_bring_their_own_model_and_rate() -> None:
    roles = {name: {"entrypoint": f"my.module:{name.title()}"} for name in ("actor", "rollout", "reward")}
    assert checked(job({"task": {}}, roles=roles)) == []
    roles["trainer"] = {"entrypoint": "my.module:Trainer"}
    assert checked(job({}, roles=roles)) == []


def test_a_file_that_is_not_here_is_a_mistake_on_this_machine_and_a_note_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"data": {"path": "no-data"}, "optim": {"lr": 1e-6}, "megatron": {"model_path": "no-model"}}
    given = job(config, roles={"actor": {"entrypoint": MEGATRON}})
    with pytest.raises(
        ConfigError, match=r"config\..*path: no-.* is no (prepared data set|model's folder) on this machine"
    ):
        checked(given)
    for elsewhere in ({"address": "ray://head:10001"}, {"nodes": 2}, {"env": "10.0.0.1:6379"}):
        if "env" in elsewhere:
            monkeypatch.setenv("RAY_ADDRESS", str(elsewhere["env"]))
        notes = checked(
            given | {"node_num": elsewhere.get("nodes", 1)}, str(elsewhere.get("address", "")) or None
        )
        first, second = sorted(notes)
        assert first.startswith("config.data.path: no-data")
        assert second.startswith("config.model_path: no-model")
        assert first.endswith("The machines that run the job must have it.")


def test_the_data_set_is_looked_into_where_it_is_here(data: str) -> None:
    config = {**SMALL, "data": {"path": data}}
    assert checked(job(config, run={"evaluate_every": 0})) == []
    with pytest.raises(ConfigError, match="has the digest"):
        checked(job(config | {"data": {"path": data, "digest": "another"}}))


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"max_position_embeddings": 512}, True),
        ({"max_position_embeddings": 1024}, False),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}, False),
    ],
)
def test_engines_that_would_read_more_than_the_model_of_a_folder_can_are_refused(
    told: Any, refused: bool, data: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | told))
    config = {"data": {"path": data}, "optim": {"lr": 1e-6}, "megatron": {"model_path": str(tmp_path)}}
    config["sampling"] = {"max_new_tokens": 64}
    given = job(config, roles={"actor": {"entrypoint": MEGATRON}}) | {"rollouts": {"context_length": 1024}}
    given["run"] = {"evaluate_every": 0}
    if refused:
        with pytest.raises(
            GraphError, match=r"rollouts\.context_length: 1024 given, .* 512 positions \(max_pos"
        ):
            checked(given)
    else:
        (note,) = checked(given)
        assert "holds no weights" in note


def test_a_job_that_has_weights_is_not_said_to_draw_them(model: str) -> None:
    given = job({"task": {}, "optim": {"lr": 1e-6}, "model_path": model}, run={"evaluate_every": 0})
    spec = parse_job(given | {"backend": "torch"})
    for has_weights in (False, True):
        _, found = submittable(spec, None, start_local=False, has_weights=has_weights)
        assert any("holds no weights" in each for each in found) is not has_weights


TORCH = "gyre.workloads.torch:TorchActor"


@pytest.mark.parametrize(
    ("changes", "backend", "sentence"),
    [
        ({"model_type": "gemma3_text"}, TORCH, "the back end torch of role actor: model_type 'gemma3_text' is"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, TORCH, "model_type 'qwen3_moe'"),
        ({"num_experts": 8}, MEGATRON, "num_experts is 8: mixtures of experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, TORCH, "rope type 'yarn' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, TORCH, "quantized weights"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, TORCH, "use_sliding_window"),
        ({"vision_config": {"depth": 2}}, TORCH, "vision_config"),
        ({"attention_bias": True}, MEGATRON, "does not fit the back end megatron of role actor: .*attention_bias"),
        ({"model_type": "llama", "mlp_bias": True, "attention_bias": True}, "sglang", "engine sglang of role rollout"),
        ({"num_key_value_heads": 1}, {"tensor_parallel": 2}, r"tensor_parallel: 2 does not .*_heads \(1\)"),
        ({"intermediate_size": 49}, {"tensor_parallel": 2}, r"intermediate_size \(49\)"),
        ({"num_hidden_layers": 3}, {"pipeline_parallel": 2}, r"num_hidden_layers \(3\)"),
        ({"vocab_size": 4097}, {"tensor_parallel": 2}, ""),  # padded
        ({"attention_bias": True}, TORCH, ""),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_in_a_sentence(
    changes: dict[str, Any], backend: Any, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    layout = backend if isinstance(backend, dict) else {}
    actor = backend if backend in (TORCH, MEGATRON) else TORCH if backend == "sglang" else MEGATRON
    config = {"task": {}, "optim": {"lr": 1e-6}, "model_path": str(tmp_path), "megatron": layout}
    given = job(config, roles={"actor": {"entrypoint": actor, "total": 2}})
    if backend == "sglang":
        given["rollouts"] = {"engine": "sglang"}
    if not sentence:
        assert ["holds no weights" in note for note in checked(given)] == [True]
        return
    with pytest.raises((ConfigError, GraphError), match=sentence):
        checked(given)


def test_a_folder_that_is_none_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(path: str, key: str = "model_path") -> str:
        config: dict[str, Any] = {"task": {}, "optim": {"lr": 1e-6}, "model": SMALL["model"]}
        roles: dict[str, Any] = {}
        if key == "reward_model":
            roles["reward"] = {"entrypoint": "gyre.workloads.torch:TorchRewardModel"}
        config[key] = path if key == "model_path" else {"path": path}
        with pytest.raises(ConfigError) as error:
            checked(job(config, roles=roles))
        return str(error.value)

    for key in ("model_path", "first_weights", "reward_model"):
        assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in refused("Qwen/Qwen3-0.6B", key)
        assert refused("Qwen/Qwen3-0.6B", key).startswith(f"config.{key}")
    assert str(tmp_path / "models/none") in refused("models/none")
    (tmp_path / "m").mkdir()
    assert "has no config.json" in refused("m")
    (tmp_path / "m/adapter_config.json").write_text("{}")
    assert "adapter" in refused("m")
    (tmp_path / "m/adapter_config.json").unlink()
    (tmp_path / "m/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m/pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, and none as safetensors" in refused("m")
    (tmp_path / "m/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "b.safetensors"}})
    )
    assert "lacks 1 of the 1 files" in refused("m")


def test_a_class_of_ones_own_trains_whatever_model_it_can(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gemma3_text"}))
    config = {"task": {}, "optim": {"lr": 1e-6}, "model_path": str(tmp_path)}
    assert checked(job(config, roles={"actor": {"entrypoint": "my.trainers:Gemma"}})) == []


def test_plan_compares_tokenizers(data: str, tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "m")
    (model / "config.json").write_text(json.dumps(CONFIG))
    config = {"data": {"path": data}, "optim": {"lr": 1e-6}, "model_path": str(model)}
    unevaluated = job(config, run={"evaluate_every": 0})
    assert len(checked(unevaluated)) == 1
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 40}))
    with pytest.raises(ConfigError, match=r"the prompts hold token \d+, the model in .* has 40 tokens"):
        checked(unevaluated)
    (model / "config.json").write_text(json.dumps(CONFIG))
    content = json.loads((model / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="tokenizer"):
        checked(unevaluated)


@pytest.mark.parametrize("section", [{}, {"path": "no-model"}])
def test_a_reward_model_is_looked_for(section: dict[str, str]) -> None:
    roles = {"reward": {"entrypoint": "gyre.workloads.torch:TorchRewardModel"}}
    with pytest.raises(ConfigError, match=r"config\.reward_model\.path: "):
        checked(job({**SMALL, "reward_model": section}, roles=roles))


# -- sections of the user's classes -------------------------------------------------------------------


class Curriculum(Section):
    levels: int = 3


class Teacher(BaseWorkload):
    SECTIONS = {"curriculum": Curriculum}  # noqa: RUF012


class Thief(BaseWorkload):
    SECTIONS = {"optim": Curriculum}  # noqa: RUF012


@pytest.mark.parametrize(
    ("config", "cls", "sentence"),
    [
        (
            {"curriculum": {"level": 4}},
            Teacher,
            r"config\.curriculum\.level: unknown key; did you mean 'levels'",
        ),
        ({"curiculum": {}}, Teacher, r"config\.curiculum: unknown key; did you mean 'curriculum'"),
        ({}, Thief, r"Thief\.SECTIONS names 'optim', a section of Gyre's"),
    ],
)
def test_a_class_names_sections_of_its_own(config: dict[str, Any], cls: type, sentence: str) -> None:
    spec = parse_job(job(config))
    with pytest.raises(ConfigError, match=sentence):
        check_class_sections(spec, {"reward": cls})


def test_keys_that_no_section_claims_stay_the_users() -> None:
    check_class_sections(parse_job(job({"curriculum": {"levels": 2}, "goal": 7})), {"reward": Teacher})


# -- evaluations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "run", "note"),
    [
        ({"n": 4}, {}, "4 samples of each prompt at temperature 0"),
        ({"n": 4}, {"evaluate_every": 0}, "run.evaluate_every is 0: nothing is evaluated"),
        ({"n": 4, "temperature": 0.6}, {}, None),
        ({"threshold": 0.5}, {}, None),
    ],
)
def test_an_evaluation_that_shows_nothing_is_noted(
    evaluation: dict[str, Any], run: dict[str, Any], note: str | None
) -> None:
    notes = [
        text for text in checked(job({**SMALL, "evaluation": evaluation}, run=run)) if "evaluation" in text
    ]
    assert [note in text for text in notes] == ([] if note is None else [True])


def test_answers_longer_than_the_model_are_refused() -> None:
    shape = SHAPE | {"max_positions": 32}
    for longest, is_refused in ((31, False), (32, True)):
        sampling = {"max_new_tokens": 8}
        given = job(SMALL | {"model": shape, "sampling": sampling, "evaluation": {"max_new_tokens": longest}})
        if is_refused:
            with pytest.raises(ConfigError, match=r"max_new_tokens: 32 leaves no room .* 32 positions"):
                checked(given)
        else:
            checked(given)


def test_a_column_that_no_held_out_prompt_has_is_named(data: str, tmp_path: Path) -> None:
    rows = [{"problem": f"Add {n} to {n}.", "answer": str(2 * n)} for n in range(8)]
    prepare(write_lines(tmp_path / "others.jsonl", rows), tmp_path / "others", tmp_path / "tokenizer")
    others = str(tmp_path / "others")

    def config(column: str) -> dict[str, Any]:
        sets = {"one": others, "other": others}
        return {
            "data": {"path": data, "held_out": sets},
            "model": SHAPE,
            "optim": {"lr": 1.0},
            "evaluation": {"by": column},
        }

    named = r"evaluation\.by: no held-out prompt has .* 'anwser'.* 'answer'"
    with pytest.raises(ConfigError, match=named) as refused:
        checked(job(config("anwser")))
    assert "looked up" not in refused.value.hint, "a column is no path"


def test_each_held_out_set_is_looked_for(data: str) -> None:
    config = {"data": {"path": data, "held_out": {"aime": "nowhere"}}, "model": SHAPE, "optim": {"lr": 1.0}}
    with pytest.raises(ConfigError, match=r"config\.data\.held_out\.aime: nowhere is no prepared data set"):
        checked(job(config))
