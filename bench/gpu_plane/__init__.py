"""The rollout plane around real engines on GPUs: each part in a process of its own, followed by what it writes.

Importing this settles the environment, which numpy and the processes that are started here read: one thread each in
BLAS, and bytecode that is kept.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # else each process that is started here compiles what it imports
