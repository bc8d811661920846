"""The soak: a job on several machines under random faults for as long as is wanted, and an account at the end.

Run as a program (`make soak`, `SOAK_S` for its seconds). It needs root on Linux: all of it runs in name spaces of its
own, which the kernel takes away with it. In them each machine is a Ray node with a network name space, so that a link
can be cut, swallow everything or be slow, and the job's home is a small file system that can be full. Nothing of it is
a test of pytest; what it finds becomes one, and `tests/test_soak.py` tests its own parts.
"""
