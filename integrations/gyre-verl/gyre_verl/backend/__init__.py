"""verl's workers as a back end of Gyre's jobs: `backend: verl`.

The model, its passes and its optimizer are verl's `TinkerTrainingWorker` with the strategy fsdp2. Steps, the ledger,
the weight plane, checkpoints' schedule and failover are Gyre's. Every process of such a job runs in verl's environment.

| module | |
| --- | --- |
| `actor` | the role, as a job names it |
| `settings` | the section `config.verl` |
| `backend` | what a learner of Gyre's asks of verl's worker |
| `worker` | verl's worker, made of a job's settings |
| `batches` | Gyre's passes as verl's batches |
| `tensors` | whole tensors in, and what a rank holds of them |
| `checkpoints` | by torch's distributed checkpoints, for any number of ranks |

Importing this package imports neither verl nor torch.
"""

from gyre.graph import Backend

BACKEND = Backend(
    classes={
        "actor": "gyre_verl.backend.actor:VerlActor",
        "critic": "gyre.workloads.fsdp:FsdpCritic",
        "reference": "gyre.workloads.fsdp:FsdpReference",
    },
    reads_model=frozenset({"reference"}),
)
"""Critic and reference are those of Gyre's own FSDP2, which runs in verl's environment too."""
