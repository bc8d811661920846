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

BACKEND = Backend(classes={"actor": "gyre_verl.backend.actor:VerlActor"})
"""It has no critic and no reference of its own: those of Gyre's FSDP2 want a newer transformers than verl does."""
