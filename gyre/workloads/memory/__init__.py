"""How much memory a job needs, before anything is started: arithmetic over a model's shape and the job's settings.

`rank` says what a rank of a learner has on its device, part by part, for a pass of so many tokens; `activations` what a
token leaves there until its gradient; `passes` how large a pass may be; `engine` and `host` the rest. `gyre plan`
prints it, and a learner asks for the size of its passes where that is `auto`.

The numbers are those of this code's own back ends: whoever changes what they keep changes it here, and
`tests/workloads/memory` compares both. `bench/memory_gpu.py` compares with a GPU's allocator.

Nothing here imports torch.
"""
