"""verl's trainer over a fleet of SGLang on GPUs, beside verl with its own SGLang on the same GPUs.

    python bench/verl_gpu.py --out DIR [--part fleet colocated] [--steps 20] [--kill-at 6] [--trainer-gpus 0 ...]
    python bench/verl_gpu.py --out DIR --dry-run --part fleet    # small, on CPUs; verl is in `make verl`'s environment

Each part is verl's own GRPO (FSDP2, padded rows, as many micro-batches) on a model of Qwen3-0.6B's shape with 640
words: 64 prompts of 48 tokens a step, 8 samples each, which end anywhere up to 256 tokens. The reward is the share of
even words.

    fleet       the trainer on some GPUs, and a fleet of two instances on the others, by `gyre-verl`. After the step
                `--kill-at` an instance is killed (SIGKILL) while samples run on it
    colocated   verl's mode `sync`: trainer and servers of verl on all GPUs, in turn. verl 0.9.1 names SGLang 0.5.12;
                what is installed is what runs

results.json has a row a part: seconds and tokens of each step, the medians, what the kill cost. Its first steps, which
compile, are not in the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_gpu import gpus, machine  # noqa: E402
from job_plane.case import TRITON, Case, Row  # noqa: E402

PARTS = ("fleet", "colocated")
NAME = "for-verl"
NEWLINE, PADDING, START, END = range(636, 640)
NAMED = {"\n": NEWLINE, "<|endoftext|>": PADDING, "<|im_start|>": START, "<|im_end|>": END}
"""The last of the 640 words. verl wants them of a tokenizer of Qwen's."""


INSTANCES = 2

STARTS_WITHIN_S = 240.0
"""For the first instance. SGLang's first start on a fresh machine takes up to 170 s."""

STEP_WITHIN_S = 180.0
"""For verl to begin, and for any step: none takes so long that makes progress."""

WARM = 3
"""Steps that are not in the medians: kernels are compiled, and the first batch has no staleness."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    words = solution_str.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)
"""

STEP = re.compile(r"step:(\d+) - (.*)")
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\)?\s*$")

KEPT = {
    "timing_s/step": "step_s",
    "timing_s/gen": "waiting_s",
    "timing_s/update_actor": "update_s",
    "timing_s/old_log_prob": "old_log_prob_s",
    "timing_s/update_weights": "weights_s",
    "gyre/seconds": "weights_s",
    "response_length/mean": "new_tokens_mean",
    "perf/total_num_tokens": "tokens",
    "critic/score/mean": "score",
    "training/rollout_probs_diff_max": "probs_diff_max",
    "training/off_policy/trajectory_staleness/max": "staleness_max",
    "actor/grad_norm": "grad_norm",
}
"""Of verl's numbers of a step."""


def case_of(given: argparse.Namespace) -> Case:
    return Case("tiny", 8, 4, 48, dry=True) if given.dry_run else Case("0.6B", 64, 8, 48)


def make_place(case: Case, root: Path) -> Path:
    """The model with a tokenizer of words, prompts, and a reward."""
    folder = case.model()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": END, "bos_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    words = {f"w{token}": token for token in range(NEWLINE)} | NAMED
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number in range(case.groups * 8):
        words_of = " ".join(f"w{token}" for token in case.prompts().prompt(number).prompt_ids)
        rows.append(
            {
                "data_source": "words",
                "prompt": [{"role": "user", "content": words_of}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
        )
    root.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), root / "prompts.parquet")
    (root / "reward.py").write_text(REWARD)
    return Path(folder)


def overrides(case: Case, model: Path, root: Path, temp: Path, ranks: int, steps: int) -> list[str]:
    """verl's, whoever generates."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    rows = case.groups * case.samples // 16 // ranks
    return [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"data.train_files={root / 'prompts.parquet'}",
        f"data.val_files={root / 'prompts.parquet'}",
        f"data.train_batch_size={case.groups}",
        f"data.max_prompt_length={case.prompt_tokens}",
        f"data.max_response_length={case.new_tokens}",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        "critic.enable=False",
        f"{rollout}.n={case.samples}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={rows}",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.ppo_mini_batch_size={case.groups}",
        f"{actor}.ppo_micro_batch_size_per_gpu={rows}",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.use_kl_loss=False",
        f"reward.custom_reward_function.path={root / 'reward.py'}",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={root / 'checkpoints'}",
        "ray_kwargs.ray_init.num_cpus=24",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        f"+ray_kwargs.ray_init._temp_dir={temp}",
    ]


@dataclass
class Verl:
    """verl's trainer as a process, and the numbers of its steps, with the time of each."""

    process: subprocess.Popen[str]
    log: Path
    until: float = float("inf")
    """When to give up, by `time.monotonic()`."""
    steps: dict[int, Row] = field(default_factory=dict)
    _new: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    @classmethod
    def start(
        cls,
        main: str,
        arguments: Sequence[str],
        *,
        dry: bool,
        devices: str,
        packages: str,
        log: Path,
        until: float,
    ) -> Verl:
        python = sys.executable
        environment = {"CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": packages}
        script = f"import sys; from {main} import main; main()"
        if dry:
            python = str(HERE.parent / ".venv-verl" / "bin" / "python")
            environment = {
                "VERL_USE_EXTERNAL_MODULES": "gyre_verl.testing.cpu",
                "VERL_PLATFORM": "cpu",
                "VERL_ENGINE_DEVICE": "cuda",
            }
            script = (
                f"import sys; from {main} import main; from gyre_verl.testing.cpu import OVERRIDES;"
                "sys.argv[1:1] = OVERRIDES; main()"
            )
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment |= {
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_worker_niceness": "0",
            # Rows have another length in each pass, and cuDNN's attention makes a plan for each shape.
            "TORCH_CUDNN_SDPA_ENABLED": "0",
        }
        process = subprocess.Popen(
            [python, "-c", script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=kept | environment,
            start_new_session=True,
        )
        verl = cls(process, log, until)
        threading.Thread(target=verl._read, name="verl", daemon=True).start()
        return verl

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if found := STEP.search(line):
                    numbers = numbers_of(found[2]) | {"at": time.time()}
                    with self._new:
                        self.steps[int(found[1])] = numbers
                        self._new.notify_all()
        with self._new:
            self._ended = True
            self._new.notify_all()

    def reach(self, step: int) -> None:
        """Raises TimeoutError where no step comes for a while, RuntimeError where verl has ended."""
        with self._new:
            while step not in self.steps:
                known = len(self.steps)
                if self._ended:
                    raise RuntimeError(f"verl ended before step {step}: {self.tail()}")
                left = min(STEP_WITHIN_S, self.until - time.monotonic())
                if not self._new.wait_for(lambda: len(self.steps) > known or self._ended, left):  # noqa: B023
                    raise TimeoutError(f"{known} steps, and no more in {left:.0f} s: {self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def numbers_of(told: str) -> Row:
    row: Row = {}
    for part in told.split(" - "):
        key, _, value = part.partition(":")
        if (name := KEPT.get(key.strip())) and (number := NUMBER.search(value)):
            row[name] = float(number[1])
    return row


def of_steps(verl: Verl, case: Case, without: Sequence[int] = ()) -> Row:
    """The medians over steps; a step's tokens/s are its new tokens by the time since the last step."""
    walls = {
        step: verl.steps[step]["at"] - verl.steps[step - 1]["at"]
        for step in verl.steps
        if step - 1 in verl.steps
    }
    rates = {
        step: verl.steps[step]["new_tokens_mean"] * case.groups * case.samples / wall
        for step, wall in walls.items()
        if wall and "new_tokens_mean" in verl.steps[step]
    }
    counted = [step for step in walls if step > WARM and step not in without]

    def median(of: dict[int, float]) -> float | None:
        found = [of[step] for step in counted if step in of]
        return round(statistics.median(found), 3) if found else None

    names = sorted({name for row in verl.steps.values() for name in row} - {"at"})
    medians = {
        name: median({step: row[name] for step, row in verl.steps.items() if name in row}) for name in names
    }
    return {
        "steps": len(verl.steps),
        "counted": len(counted),
        "wall_s": median(walls),
        "new_tokens_per_s": median(rates),
        "medians": medians,
        "by_step": {step: verl.steps[step] for step in sorted(verl.steps)},
    }


# -- over a fleet -------------------------------------------------------------------------------------


@dataclass
class Fleet:
    home: Path
    handle: Any
    key: str

    @property
    def url(self) -> str:
        return self._endpoint()[0]

    def _endpoint(self) -> tuple[str, str]:
        from gyre.api.home import home
        from gyre.rollouts.protocol.endpoint import read_endpoint

        found = read_endpoint(home(self.home).job_directory(self.handle.job_id))
        assert found is not None
        return found

    def ask(self, path: str, key: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=10.0) as reply:
            return json.loads(reply.read() or b"{}")

    def status(self) -> Any:
        """The manager's."""
        return self.ask("/v1/status", self._endpoint()[1])

    def serving(self, count: int) -> None:
        """So many instances serve."""
        until = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError, AssertionError):  # it is not there yet
                if len(self.ask("/v1/policies", self.key)["instances"]) >= count:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{count} instances do not serve within {STARTS_WITHIN_S:.0f} s: {self.status()}")

    def busy(self, running: int) -> Row:
        """The instance with most samples, once so many run there."""
        until = time.monotonic() + STEP_WITHIN_S
        while time.monotonic() < until:
            most = max(self.status()["instances"], key=lambda one: one["running"], default=None)
            if most is not None and most["running"] >= running:
                return dict(most)
            time.sleep(0.02)
        raise TimeoutError("no samples run after the step")


def gyre(home: Path, *arguments: str) -> str:
    told = subprocess.run(
        [sys.executable, "-m", "gyre.api", *arguments],
        env=os.environ | {"GYRE_HOME": str(home), "PYTHONPATH": path()},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    if told.returncode:
        raise RuntimeError(f"gyre {' '.join(arguments)}: {told.stderr[-3000:]}")
    return told.stdout.strip()


def path() -> str:
    """Of the processes that are started here."""
    own = (HERE.parent, HERE.parent / "integrations" / "gyre-verl", HERE)
    return os.pathsep.join([*map(str, own), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@contextlib.contextmanager
def fleet_on(case: Case, model: Path, root: Path, devices: str) -> Iterator[Fleet]:
    """A fleet on these GPUs, on a Ray of its own, which is ended with the block."""
    from gyre.api.handle import JobHandle
    from gyre.api.home import home as home_of
    from gyre.api.ray_session import connect, disconnect
    from gyre.store import open_store

    os.environ["PYTHONPATH"] = path()
    if not case.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    home = root / "home"
    spec: Row = {
        "name": NAME,
        "recipe": "fleet",
        "config": {"model_path": str(model)},
        "rollouts": {"report_interval_s": 0.05},
        "roles": {"rollout": {"total": INSTANCES}},
    }
    if not case.dry:
        count = len(devices.split(","))
        spec |= {"device_type": "GPU", "device_per_node": count}
        share = min(1.0, count / INSTANCES) * (0.5 if "0" in devices.split(",") else 1.0)
        spec["roles"]["rollout"]["resources"] = {"accelerator": share}
        large = ["--max-running-requests", "512", "--cuda-graph-max-bs", "512", "--disable-radix-cache"]
        memory = ["--mem-fraction-static", "0.3" if share == 0.5 else "0.2" if share < 0.5 else "0.8"]
        spec["rollouts"] |= {
            "engine": "sglang",
            "engine_args": [*TRITON, *large, *memory],
            "context_length": 512,
            "max_running": 512,
            "ready_timeout_s": STARTS_WITHIN_S,
        }
    file = root / "fleet.json"
    file.write_text(json.dumps(spec))
    address = connect("local", start_local=True, place=home_of(home))
    try:
        gyre(home, "submit", str(file), "--ray-address", address)
        store_url = f"sqlite:///{home / 'gyre.db'}"
        with open_store(store_url) as store:
            (job_id,) = [row.job_id for row in store.jobs(live=True) if row.name == NAME]
        handle = JobHandle(job_id, store_url, home_path=str(home))
        key = gyre(
            home, "token", "create", NAME, "--name", "lab", "--scope", "generate", "--scope", "publish"
        )
        try:
            yield Fleet(home, handle, key)
        finally:
            handle.stop("the measurement is over")
            handle.wait(60.0)
            handle.close()
            for log in home.glob("jobs/*/logs/*"):
                (root / f"fleet_{log.name}").write_bytes(log.read_bytes()[-200_000:])
    finally:
        disconnect()


def over_a_fleet(
    given: argparse.Namespace, case: Case, model: Path, root: Path, details: Path, row: Row
) -> None:
    from gyre.testing.processes import ProcessFaults

    began, until = time.time(), time.monotonic() + given.within
    with fleet_on(case, model, root, given.fleet_gpus) as fleet:
        fleet.serving(1)
        row["first_instance_s"] = round(time.time() - began, 1)
        fleet.serving(INSTANCES)
        row["all_instances_s"] = round(time.time() - began, 1)
        faults = ProcessFaults(fleet.handle)
        ranks = 2 if case.dry else len(given.trainer_gpus.split(","))
        own = [f"fleet.url={fleet.url}", f"fleet.key={fleet.key}", "fleet.weights=plane"]
        arguments = [*own, *overrides(case, model, root, root / "v", ranks, given.steps)]
        verl = Verl.start(
            "gyre_verl.main",
            arguments,
            dry=case.dry,
            devices=given.trainer_gpus,
            packages=f"{given.verl_packages}:{path()}",
            log=details / "fleet.log",
            until=until,
        )
        began = time.time()
        try:
            verl.reach(1)
            row["first_step_s"] = round(time.time() - began, 1)
            struck: list[int] = []
            if given.kill_at:
                verl.reach(given.kill_at)
                row["kill"] = kill(fleet, faults, verl, case.groups * case.samples // 16)
                struck = list(range(given.kill_at + 1, row["kill"]["back_at_step"] + 2))
            verl.reach(given.steps)
            row["returncode"] = verl.process.wait(60.0)
        finally:
            verl.stop()
            row |= of_steps(verl, case, struck if given.kill_at and "kill" in row else ())
        # A fleet's own ledger has no prompts: what it owes verl are tokens.
        row["manager"] = account = fleet.status()["account"]
        if not account["generated"] or account["missing"]:
            raise RuntimeError(f"the fleet's account does not add up, or is of nothing: {account}")


def kill(fleet: Fleet, faults: Any, verl: Verl, running: int) -> Row:
    """Kill the instance on which most samples run, and wait until another has its place."""
    victim = fleet.busy(running)
    at_step = max(verl.steps)
    killed = time.time()
    (gone,) = faults.kill(victim["instance"])
    faults.replaced(gone, timeout_s=STARTS_WITHIN_S)
    fleet.serving(INSTANCES)
    row = {
        "instance": victim["instance"],
        "running": victim["running"],
        "after_step": at_step,
        "back_s": round(time.time() - killed, 1),
        "back_at_step": max(verl.steps),
    }
    for event in fleet.handle.events():
        body = event["body"]
        left = body["details"] if body.get("what") == "InstanceLeft" else {}
        if event["at"] >= killed and left.get("instance") == victim["instance"]:
            return row | {"moved": int(left["moved"]), "tokens_kept": int(left["tokens"])}
    return row


# -- with verl's own servers --------------------------------------------------------------------------


def colocated(
    given: argparse.Namespace, case: Case, model: Path, root: Path, details: Path, row: Row
) -> None:
    count, until = gpus(), time.monotonic() + given.within
    rollout = "actor_rollout_ref.rollout"
    engine = f"+{rollout}.engine_kwargs.sglang"
    arguments = [
        f"{rollout}.name=sglang",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.5",
        f"{rollout}.max_num_seqs=512",
        f"{rollout}.max_model_len=512",
        f"{engine}.attention_backend=triton",
        f"{engine}.sampling_backend=pytorch",
        f"{engine}.grammar_backend=none",
        f"{engine}.disable_radix_cache=True",
        *overrides(case, model, root, root / "c", count, given.colocated_steps),
    ]
    devices = ",".join(map(str, range(count)))
    verl = Verl.start(
        "verl.trainer.main_ppo",
        arguments,
        dry=False,
        devices=devices,
        packages=f"{path()}:{given.verl_packages}",  # SGLang's versions win
        log=details / "colocated.log",
        until=until,
    )
    try:
        verl.reach(given.colocated_steps)
        row["returncode"] = verl.process.wait(60.0)
    finally:
        verl.stop()
        row |= of_steps(verl, case)


# -- table --------------------------------------------------------------------------------------------


def table(results: Row) -> str:
    names = ("wall_s", "new_tokens_per_s", "update_s", "old_log_prob_s", "waiting_s", "weights_s", "score")
    lines = [f"{'':<12}" + "".join(f"{name:>18}" for name in ("steps", *names))]
    for part in PARTS:
        if (row := results.get(part)) is None:
            continue
        if "error" in row:
            lines.append(f"{part:<12}{row['error'][:120]}")
        if row.get("steps"):
            cells = [row["steps"], *(row.get(name, row["medians"].get(name)) for name in names)]
            lines.append(f"{part:<12}" + "".join(f"{'' if cell is None else cell:>18}" for cell in cells))
        if "kill" in row:
            lines.append(f"{'':<12}{json.dumps(row['kill'])}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=6, help="the step after which an instance is killed")
    parser.add_argument("--colocated-steps", type=int, default=10)
    parser.add_argument("--within", type=float, default=400.0, help="seconds for a part, its start included")
    parser.add_argument("--trainer-gpus", default="0")
    parser.add_argument("--fleet-gpus", default="1", help="where 0 is among them, instances leave room there")
    parser.add_argument(
        "--verl-packages",
        default="",
        help="a folder, where verl is not among the packages of this interpreter",
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    given = parser.parse_args()
    case = case_of(given)
    details = given.out / "details"
    details.mkdir(parents=True, exist_ok=True)
    root = Path(f"/tmp/vg{os.getpid()}")  # short: there are sockets below it
    model = make_place(case, root)
    results: Row = {"machine": machine(), "command": f"python bench/verl_gpu.py {' '.join(sys.argv[1:])}"}
    for part in given.part:
        measure = over_a_fleet if part == "fleet" else colocated
        began = time.time()
        row: Row = {}
        try:
            measure(given, case, model, root, details, row)
        except Exception as error:  # it is the row: the other part is worth having
            row["error"] = f"{type(error).__name__}: {error}"[-4000:]
        results[part] = row | {"took_s": round(time.time() - began, 1)}
        (given.out / "results.json").write_text(json.dumps(results, indent=1))
        for log in root.glob("fleet_*"):
            (details / log.name).write_bytes(log.read_bytes())
    print(json.dumps(results, indent=1) if given.json else table(results))
    return 1 if any("error" in results[part] for part in given.part) else 0


if __name__ == "__main__":
    sys.exit(main())
