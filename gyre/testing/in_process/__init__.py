"""A whole job's data plane in one process, without Ray: for tests of workloads, of trainers and of their recovery.

    job = InProcessJob(spec, tmp_path)
    job.on("actor.apply", 3, lambda: job.kill("actor-1"), when="after")
    with job:
        result = job.result(timeout_s=60)
    assert job.account().trained_twice == ()

The master, its journal, the hosts, the trainer and the sample ledger are the real ones. Acted out are the processes,
and death: every vertex has one thread for its calls, as it has one process elsewhere; control calls run on threads of
their own. Arguments and results of the trainer's calls are pickled and unpickled, so nothing is shared by accident,
and arrays arrive read-only, as they do from Ray's object store.

Invariants:
- *dead is dead*: no result of a killed vertex is ever delivered, none of its reports is read, and code that still
  runs in it ends at its next `report_progress`;
- *deaths land where they are put*: an action of `on` runs in the thread of the call that it was put at, before
  that call begins or after it has ended and before anybody has heard of it; or in the thread of the caller, when the
  call is on its way.

What one process cannot show: `env` and `sys.path` are shared by all vertices (and put back by `close`), and
collectives over Gloo or NCCL need processes; `collective_of` is a stand-in for workloads that can use it.
"""

from gyre.testing.in_process.cluster import InProcessCluster
from gyre.testing.in_process.collective import InProcessCollective, collective_of
from gyre.testing.in_process.host import EPOCH, InProcessHost, Killed, Moments
from gyre.testing.in_process.job import InProcessJob
from gyre.testing.in_process.transport import InProcessTransport
from gyre.testing.in_process.vertex import InProcessVertex

__all__ = [
    "EPOCH",
    "InProcessCluster",
    "InProcessCollective",
    "InProcessHost",
    "InProcessJob",
    "InProcessTransport",
    "InProcessVertex",
    "Killed",
    "Moments",
    "collective_of",
]
