"""Whether it learns: jobs as a user submits them, from a warm start to what they come to, by their journals.

    python bench/learning.py --out FILE [--on cpu|gpu] [--gpus N] [--case NAME ...] [--seeds 0 1 2] [--steps N]

The task is addition; exact match is the reward. A supervised warm start leaves a model that forgets to carry: the table
says what share of the held-out problems it has right before and after. From there each case trains by GRPO, with
truncated importance sampling (a cap of 2) and a seed for the model, the prompts and the samples:

    synchronous          every token is of the policy that is trained
    one step stale       generation is up to one policy version ahead
    four steps stale     up to four
    streamed             one step stale, and micro-batches of whichever groups are scored first
    killed               one step stale, while each kind of process is killed once, one after another

On CPUs the actors are plain torch and the engines Gyre's own; with `--on gpu` they are Megatron and SGLang. FILE has a
row for each run, written when it ends; a run that FILE has is not made again. `learning_figure.py` draws it.

How far engine and trainer agree is `rollout_kl`: per token, Schulman's k3 of the trainer's log-probs to the engine's.
In a synchronous job it is their disagreement alone; in others it is also what the policy has learnt since.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from gyre.api import RLJobBuilder  # noqa: E402
from gyre.api.handle import JobHandle  # noqa: E402
from gyre.errors import GyreError  # noqa: E402
from gyre.testing.processes import ProcessFaults  # noqa: E402

Row = dict[str, Any]

STEPS = 120
EVALUATE_EVERY = 10
TIS_CAP = 2.0

RATE, STALE_RATE = 1e-3, 4e-4
"""Learning rates. Four steps stale, the larger one takes the policy so far in those steps that it does not learn on."""

TRITON = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
"""Kernels that need no compiler on the machine."""

HALF = ["--mem-fraction-static", "0.3"]
"""The engine's memory where the trainer is on the same GPU."""

STALENESS = {
    "synchronous": 0,
    "one step stale": 1,
    "four steps stale": 4,
    "streamed": 1,
    "killed": 1,
}

DEATHS = (
    (0.10, "rollout_manager-0"),
    (0.22, "rollout-0"),
    (0.34, "reward-0"),
    (0.46, "actor-0"),
    (0.58, "trainer-0"),
    (0.70, "master"),
)
"""After which share of the steps who is killed, by SIGKILL."""

BACK_S = 400.0
"""For what was killed to be back: on a GPU an engine starts in some 100 s."""


def builder(on: str, case: str, *, seed: int, steps: int, digits: int, gpus: int = 2) -> RLJobBuilder:
    """The job of a case: GRPO on sums of numbers of so many digits. On one GPU the actor and the engine have half of it
    each."""
    made = (
        RLJobBuilder()
        .node_num(1)
        .recipe("grpo")
        .config(
            {
                "seed": seed,
                "task": {"digits": digits, "operators": "+"},
                "model": {
                    "layers": 2,
                    "hidden": 128,
                    "heads": 4,
                    "kv_heads": 2,
                    "mlp": 384,
                    "max_positions": 32,
                },
                "sampling": {"n": 8, "temperature": 1.0, "max_new_tokens": digits + 2},
                "optim": {"lr": STALE_RATE if STALENESS[case] > 1 else RATE},
                "warm_start": {"max_steps": 600, "batch": 256, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
                "loss": {"tis_imp_ratio_cap": TIS_CAP},
            }
        )
        .run(
            steps=steps,
            prompts_per_step=128,
            groups_per_firing=32,
            groups_per_micro_batch=64,
            checkpoint_every=10,
            evaluate_every=EVALUATE_EVERY,
            held_out=512,
            micro_batches="streamed" if case == "streamed" else "fixed",
        )
        .failover(silence_timeout_s=6.0)
        .max_staleness(STALENESS[case])
    )
    if on == "gpu":
        made = (
            made.device_type("GPU")
            .device_per_node(gpus)
            .backend("megatron")
            .rollouts(
                engine="sglang",
                engine_args=TRITON + (HALF if gpus == 1 else []),
                context_length=32,
                ready_timeout_s=BACK_S,
            )
        )
        ranks, instances = 1, 1
    else:
        made = made.device_type("CPU").device_per_node(8)
        ranks, instances = 2, 2
    share = 0.5 if on == "gpu" and gpus == 1 else 1.0
    made = made.actor().total(ranks).resources(accelerator=share).setup_timeout(BACK_S).end()
    made = made.rollout().total(instances).resources(accelerator=share).stall_timeout(BACK_S).end()
    return made.reward().total(1).resources(accelerator=0).end()


class Deaths:
    """What is killed in a job, each when the last is back."""

    def __init__(self, handle: JobHandle, steps: int) -> None:
        self._faults = ProcessFaults(handle)
        self._steps = steps
        self.told: list[Row] = []
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for share, name in DEATHS:
            after = max(1, round(share * self._steps))
            try:
                self._faults.reach_step(after, timeout_s=BACK_S)
                (victim,) = self._faults.kill(name)
                killed = time.monotonic()
                self._faults.replaced(victim, timeout_s=BACK_S)
            except (
                TimeoutError,
                ProcessLookupError,
                GyreError,
            ) as error:  # the row says so, and the run counts less
                self.told.append({"after_step": after, "who": name, "error": repr(error)})
                return
            self.told.append(
                {"after_step": after, "who": name, "back_s": round(time.monotonic() - killed, 2)}
            )

    def join(self) -> list[Row]:
        self._thread.join(BACK_S)
        return self.told


def run(
    on: str, case: str, seed: int, home: Path, *, steps: int, digits: int, within_s: float, gpus: int = 2
) -> Row:
    """Run one job to its end. Raises GyreError if it fails, TimeoutError if it does not end."""
    name = f"{case.replace(' ', '-')}-{seed}"
    began = time.monotonic()
    made = builder(on, case, seed=seed, steps=steps, digits=digits, gpus=gpus).build()
    handle = made.submit(name, home_path=home)
    try:
        deaths = Deaths(handle, steps) if case == "killed" else None
        view = handle.wait(within_s)
        row: Row = {"case": case, "seed": seed, "on": on, "digits": digits}
        row |= {"wall_s": round(time.monotonic() - began, 1), **curves(handle)}
        result = view["job"]["result"]
        row |= {key: result[key] for key in ("steps", "prompts_lost", "trained_twice", "tokens")}
        row["incidents"] = len(view["incidents"])
        if deaths is not None:
            row["deaths"] = deaths.join()
        return row
    finally:
        if not handle.status()["job"]["ended_at"]:
            handle.stop("it took too long")
        handle.close()


def curves(handle: JobHandle) -> Row:
    """What the journal has: by step the mean reward, `rollout_kl` and how stale the tokens were; and by version the
    share of held-out problems that are answered rightly."""
    steps: dict[int, list[float]] = {}
    evaluations: dict[int, float] = {}
    for event in handle.events():
        body = event["body"]
        if event["kind"] == "StepCompleted" and not body["again"]:
            told = body["metrics"]
            kl = told.get("rollout_kl", 0.0)  # of a step whose groups are all flat no token is computed again
            steps[body["step"]] = [told["reward_mean"], kl, told["staleness_mean"]]
        elif event["kind"] == "Evaluated":
            evaluations[body["version"]] = body["accuracy"]
    return {
        "by_step": [[step, *(float(f"{value:.4g}") for value in steps[step])] for step in sorted(steps)],
        "accuracy": [[version, round(evaluations[version], 4)] for version in sorted(evaluations)],
    }


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'case':18} {'seed':>4} {'before':>7} {'after':>7} {'stale':>6} {'kl, first 10':>12} {'kl, last 10':>12} "
        f"{'lost':>5} {'twice':>5} {'deaths':>6} {'s':>6}"
    ]
    for row in rows:
        kl = [step[2] for step in row["by_step"]]
        stale = [step[3] for step in row["by_step"]]
        lines.append(
            f"{row['case']:18} {row['seed']:4d} {row['accuracy'][0][1]:7.1%} {row['accuracy'][-1][1]:7.1%} "
            f"{sum(stale) / len(stale):6.2f} {mean(kl[:10]):12.2e} {mean(kl[-10:]):12.2e} "
            f"{row['prompts_lost']:5d} {row['trained_twice']:5d} {len(row.get('deaths', ())):6d} {row['wall_s']:6.0f}"
        )
    return "\n".join(lines)


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2)
    parser.add_argument("--case", nargs="+", choices=STALENESS, default=list(STALENESS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--within", type=float, default=900.0, help="seconds for one run")
    parser.add_argument("--total", type=float, default=1e9, help="seconds after which no run begins")
    given = parser.parse_args()
    report: Row = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    began = time.monotonic()
    ok = True

    def has(case: str, seed: int) -> bool:
        return any((row["case"], row["seed"], row["on"]) == (case, seed, given.on) for row in report["rows"])

    with tempfile.TemporaryDirectory(prefix="gl", dir="/tmp") as home:  # short, for Ray's sockets
        for seed in given.seeds:
            for case in given.case:
                if has(case, seed) or time.monotonic() - began > given.total:
                    continue
                try:
                    row = run(
                        given.on,
                        case,
                        seed,
                        Path(home),
                        steps=given.steps,
                        digits=given.digits,
                        within_s=given.within,
                        gpus=given.gpus,
                    )
                except (GyreError, TimeoutError) as error:
                    print(f"{case}, seed {seed}: {error}", file=sys.stderr, flush=True)
                    ok = False
                    continue
                report["rows"].append(row)
                given.out.write_text(dumped(report))
                print(table(report["rows"][-1:]).splitlines()[1], flush=True)
    print(table(report["rows"]))
    return 0 if ok else 1


def dumped(report: Row) -> str:
    """JSON with a line for each row, after whatever else the report has."""
    rest = "".join(f"{json.dumps(key)}: {json.dumps(report[key])},\n" for key in report if key != "rows")
    rows = ",\n".join(json.dumps(row) for row in report["rows"])
    return f'{{{rest}"rows": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    raise SystemExit(main())
