"""What is recorded of a process that died without an exception: a sentence, and not Ray's list of possible causes."""

from __future__ import annotations

from gyre.master.ray_cluster import how_it_died

OF_RAY = """\
The actor died unexpectedly before finishing this task.
\tclass_name: VertexHost
\tactor_id: d012df55cbef438371aeebc201000000
\tpid: 27058
\tname: kill-09a57d26/rollout-0/1
\tnamespace: gyre
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force \
was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error. If \
the process was killed by the kernel OOM killer (verifiable by checking for OOM in dmesg of the \
OOMing node), consider enabling resource isolation via --enable-resource-isolation to prevent node \
deaths."""
"""Ray 2.60, of a vertex that was killed by SIGKILL."""


def test_of_a_killed_process_there_is_one_sentence() -> None:
    assert how_it_died(OF_RAY) == (
        "process 27058 was killed or crashed, without a Python exception (`dmesg` shows whether the kernel killed it "
        "for memory)"
    )


def test_what_ray_says_of_another_death_is_kept() -> None:
    other = OF_RAY.partition("Worker exit type")[0] + "Worker exit detail: Worker exits by an expected exit."
    assert how_it_died(other) == other
