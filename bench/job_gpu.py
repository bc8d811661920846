"""The product's own job on GPUs, as a user runs it, beside what each of its halves does alone in the same run.

    python bench/job_gpu.py --out DIR [--part engine+trainer job ...] [--lengths ...] [--prompt-tokens N] [--dry-run]
    python bench/job_gpu.py --out DIR --plan FILE        # cases one after another: a line of these arguments each

Parts, each a process of its own with a limit of time; `engine+trainer` are measured at once where there are two GPUs:

    engine      SGLang alone, best settings by hand, on as many samples of the same prompts and lengths
    trainer     Megatron alone, on batches of the same shapes and micro-batches
    colocated   both on all GPUs, synchronously in turn, with the weights handed over; it is run, not computed
    job         `gyre run` of `examples/grpo_gsm8k.yaml`: Ray, master, all roles, ledger, checkpoints; only the data,
                the model and the reward are of the bench (`job_plane/load.py`). Its numbers are from its journal
    kills       the same, where an engine is killed every so often
    chaos       the same, where one of each kind of process is killed in turn: how long until it trains again, what is
                done again, that no prompt is lost or trained twice, and who was taken for dead and was not

Lengths: `equal`, all of 256; `anywhere`, ending anywhere up to 256; `lognormal`, median 400, at most 2,048: a prompt's
samples share a limit, which the prompt brings, and one in five ends before it.

results.json has all cases and parts, and is written anew after each part, and after each event of a job that runs; what
is asked for again is measured again, unless it is to be only what is `--missing`: a plan then goes on where an earlier
call ended. A job's journal, without its samples, and its logs are in the folder of details. Where that is not below
OUT, a zip file of each job's of at most 15 MiB is in OUT.
The table is printed at the end, or with `--table` alone from what is there. With `--dry-run` everything runs small, on
CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import LENGTHS, SHAPES, Case, Row  # noqa: E402
from job_plane.chaos import KINDS, USUAL, Chaos  # noqa: E402
from job_plane.job import pack  # noqa: E402
from job_plane.table import table  # noqa: E402

PACKAGES = ("torch", "sglang", "sglang-kernel", "megatron-core", "transformers", "aiohttp", "numpy")

PARTS = ("engine", "trainer", "colocated", "job", "kills", "chaos")

JOBS = ("job", "kills", "chaos")
"""Parts that run the job."""

LIMITS_S = {"engine": 300.0, "trainer": 200.0, "colocated": 240.0}
"""Of a part that has no `--within`. A first engine on a fresh machine takes up to 170 s to start."""

UNFINISHED = "unfinished"
"""The key of a row that is of a part that runs."""

ENDING_S = 70.0
"""For a job to be stopped, beyond its `--within`: it takes some 8 s, with a checkpoint of 4B all that `job` gives."""

LEAST_S = {"job": ENDING_S + 80.0, "kills": ENDING_S + 200.0, "chaos": ENDING_S + 120.0}
"""With less of `--total` left, the part does not begin; 45 s for others. A job needs 50 s for its first step where the
machine has compiled its kernels."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--details", type=Path, help="folder of logs, journals and samples of each part; OUT/details"
    )
    parser.add_argument("--part", nargs="+", default=["engine+trainer", "job"], help="of " + ", ".join(PARTS))
    parser.add_argument("--lengths", choices=LENGTHS, default="anywhere")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--groups", type=int, help="groups of 8 in a step")
    parser.add_argument(
        "--turns", type=int, default=1, help="of a session: with more than one, agents run the job's"
    )
    parser.add_argument("--example", default=Case.example, help="of examples/, whose job is run")
    parser.add_argument(
        "--steps", type=int, help="of the job; 60 of the 0.6B with lognormal lengths, else 15"
    )
    parser.add_argument("--engines", type=int, default=1, help="of the job")
    parser.add_argument("--ranks", type=int, default=1, help="of the job's actor")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the ranks, with Megatron")
    parser.add_argument("--backend", choices=("fsdp",), default="", help="where the example has another")
    parser.add_argument("--label", default="", help="added to the case's name, where only settings differ")
    parser.add_argument("--set", action="append", default=[], help="as of gyre run, for the job")
    parser.add_argument("--engine-python", default="", help="that SGLang is installed in, if not this one")
    parser.add_argument("--within", type=float, default=400.0, help="seconds for the job, its start included")
    parser.add_argument("--kill-every", type=float, default=120.0)
    parser.add_argument("--kill-for", type=float, default=480.0, help="seconds from the first kill on")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=USUAL, help="who dies, of the part chaos"
    )
    parser.add_argument("--times", type=int, default=2, help="how often one of each kind dies")
    parser.add_argument("--profile-at", type=int, default=0, help="the step after which py-spy records")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plan", type=Path, help="a file with a case's arguments a line")
    parser.add_argument("--total", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--missing", action="store_true", help="measure only what results.json has not")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and no more")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    return parser


def case_of(given: argparse.Namespace) -> Case:
    if given.dry_run:
        case = Case("tiny", 4, 4, 16, given.lengths, given.steps or 8, dry=True)
    else:
        case = Case(lengths=given.lengths)
        shape = given.shape or case.shape
        steps = 60 if (shape, given.lengths) == ("0.6B", "lognormal") else case.steps
        case = replace(
            case,
            shape=shape,
            steps=given.steps or steps,
            prompt_tokens=given.prompt_tokens or case.prompt_tokens,
            groups=given.groups or case.groups,
        )
    return replace(
        case,
        engines=given.engines,
        example=given.example,
        ranks=given.ranks,
        tensor_parallel=given.tensor_parallel,
        backend=given.backend,
        turns=given.turns,
    )


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    # So that parts, engines and jobs are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.only:
        return one_part(given)
    file = given.out / "results.json"
    results: Row = json.loads(file.read_text()) if file.exists() else {}
    if not given.table:
        ends = time.monotonic() + given.total
        for arguments_given in planned(given):
            each = parser.parse_args(arguments_given)
            for part in each.part:
                if given.missing and is_there(each, part, results):
                    continue
                if ends - time.monotonic() < LEAST_S.get(part, 45.0):
                    print(f"no time is left for {part} of {' '.join(arguments_given)}", flush=True)
                    continue
                measure(each, part, arguments_given, results, ends)
    print(json.dumps(results, indent=1) if given.json else table(results))
    return 0


def name_of(given: argparse.Namespace) -> str:
    return case_of(given).name + (f", {given.label}" if given.label else "")


def is_there(given: argparse.Namespace, part: str, results: Row) -> bool:
    """Whether the results have the part, or both where it is two, to its end and without an error."""
    here = results.get(name_of(given), {})
    return all(not {"error", UNFINISHED} & here.get(one, {"error": ""}).keys() for one in part.split("+"))


def planned(given: argparse.Namespace) -> list[list[str]]:
    """The arguments of each case; those of this call are before those of the plan."""
    common = sys.argv[1:]
    if given.plan is None:
        return [common]
    lines = [line.split("#")[0].strip() for line in given.plan.read_text().splitlines()]
    return [[*common, *shlex.split(line)] for line in lines if line]


def measure(
    given: argparse.Namespace, part: str, arguments_given: list[str], results: Row, ends: float
) -> None:
    """Measure the part, or both where it is `engine+trainer`, in processes of their own, and add the rows."""
    case = case_of(given)
    name = name_of(given)
    here = results.setdefault(name, {"case": asdict(case)})
    results.setdefault("machine", machine())
    parts = part.split("+")
    unknown = [one for one in parts if one not in PARTS]
    if unknown:
        raise SystemExit(f"--part: {unknown[0]} is none of {', '.join(PARTS)}")
    case.model()  # once, before parts begin that read it at once
    together = len(parts) > 1 and (case.dry or gpus() > 1)
    running: list[tuple[str, Part]] = []
    for gpu, one in enumerate(parts):
        limit = given.within + ENDING_S if one in JOBS else LIMITS_S[one]
        limit = min(limit, ends - time.monotonic())
        if one in JOBS:
            arguments_given = [*arguments_given, "--within", f"{limit - ENDING_S:.0f}"]
        details = given.details or given.out / "details"
        details.mkdir(parents=True, exist_ok=True)
        began = Part(details, name, one, arguments_given, limit, gpu if together else 0)
        running.append((one, began))
        if not together:
            finish(began, one, name, here, given.out, results)
            running.clear()
    for one, began in running:
        finish(began, one, name, here, given.out, results)


def finish(began: Part, part: str, name: str, here: Row, out: Path, results: Row) -> None:
    """Wait for the part; its row is in the results as far as it is known at any moment."""

    def note(row: Row) -> None:
        here[part] = row
        save(out, results)

    row = began.row(note)
    if part in JOBS and not began.details.is_relative_to(out):
        left_out = pack(began.details, began.label, out / f"{began.label}.zip")
        row |= {"not_packed": left_out} if left_out else {}
    note(row)
    tell(name, part, row)


class Part:
    """A part of a case in a process of its own, which has `limit_s`."""

    def __init__(
        self, details: Path, name: str, part: str, arguments_given: list[str], limit_s: float, gpu: int
    ) -> None:
        safe = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in f"{name}_{part}")
        self.details, self.label = details, safe
        self._file = details / f"{safe}.json"
        self._file.unlink(missing_ok=True)
        self._log = details / f"{safe}.out"
        self._began = time.monotonic()
        self._limit_s = limit_s
        command = [sys.executable, __file__, *arguments_given, "--only", f"{part}@{gpu}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--row", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def row(self, note: Callable[[Row], None]) -> Row:
        """Its row, when it has ended or its limit has passed. `note` gets each row that it has before."""
        late, seen = False, 0.0
        try:
            while self._process.poll() is None and not late:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.5)
                if self._file.exists() and (written := self._file.stat().st_mtime) != seen:
                    seen = written
                    note(self._read())
                late = time.monotonic() > self._began + self._limit_s
        finally:
            if self._process.poll() is None:
                self._end()
        row = self._read()
        if not row or UNFINISHED in row:
            why = f"it took longer than {self._limit_s:.0f} s" if late else "it ended without a row"
            row.pop(UNFINISHED, None)
            row["error"] = f"{why}: {self._log.read_text(errors='replace')[-3000:]}"
        return row | {"took_s": round(time.monotonic() - self._began, 1)}

    def _read(self) -> Row:
        row: Row = json.loads(self._file.read_text()) if self._file.exists() else {}
        return row

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def one_part(given: argparse.Namespace) -> int:
    """Measure one part in this process, and write its row."""
    part, _, gpu = given.only.partition("@")
    try:
        row = row_of(given, part, int(gpu))
    except Exception as error:  # it is the row: the other parts are worth having
        seen = json.loads(given.row.read_text()) if given.row.exists() else {}
        row = seen | {"error": f"{type(error).__name__}: {error}"[:4000]}
        row.pop(UNFINISHED, None)
    write(given.row, row)
    return 0


def write(file: Path, row: Row) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(row))
    partial.rename(file)


def row_of(given: argparse.Namespace, part: str, gpu: int) -> Row:
    case = case_of(given)
    if part == "engine":
        from job_plane.generation import engine_alone

        return asyncio.run(engine_alone(case, gpu, given.engine_python))
    if part == "trainer":
        from job_plane.trainer_alone import trainer_alone

        return trainer_alone(case, gpu)
    if part == "colocated":
        from job_plane.colocated import colocated

        return asyncio.run(colocated(case, 2 if case.dry else gpus()))
    return job_row(case, given, part)


def job_row(case: Case, given: argparse.Namespace, part: str) -> Row:
    from job_plane.account import events_in, looks_in
    from job_plane.job import job
    from job_plane.kills import Kills

    attack: Kills | Chaos | None = None
    if part == "kills":
        attack = Kills(every_s=given.kill_every, for_s=given.kill_for)
    elif part == "chaos":
        attack = Chaos(given.kinds, given.times, case.engines)
    if attack is not None:
        case = replace(case, steps=100_000)
    details, label = given.row.parent, given.row.stem

    def whole(row: Row) -> Row:
        if isinstance(attack, Kills):
            row["kills"] = attack.summary(row.get("steps", []), looks_in(details, label), case.engines)
        elif isinstance(attack, Chaos):
            row["chaos"] = attack.summary(events_in(details, label))
        return row

    row = job(
        case,
        details,
        label,
        [*given.set, *([f"rollouts.engine_python={given.engine_python}"] if given.engine_python else [])],
        within_s=given.within,
        profile_at=given.profile_at,
        attack=attack,
        tell=lambda row: write(given.row, whole(row) | {UNFINISHED: True}),
    )
    return whole(row)


def save(out: Path, results: Row) -> None:
    partial = out / "results.partial"
    partial.write_text(json.dumps(results, indent=1))
    partial.rename(out / "results.json")


def tell(name: str, part: str, row: Row) -> None:
    short = {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in row.items()
        if isinstance(value, int | float | str) or value is None
    }
    print(f"{name}: {part} {json.dumps(short)[:1500]}", flush=True)


def gpus() -> int:
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in told.stdout.splitlines())


def machine() -> Row:
    """The machine, its packages and the commit."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "gpus": output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "packages": packages,
        "commit": output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }


if __name__ == "__main__":
    sys.exit(main())
