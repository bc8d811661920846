"""The soak: a job on several machines under random faults for as long as is wanted, and an account at the end.

Run as a program (`make soak`, `SOAK_S` for its seconds). It needs root on Linux: each machine is a Ray node in a
namespaces of its own, so that a link can be cut, swallow everything or be slow, and the job's home is a small
file system that can be full. Nothing of it is a test of pytest; what it finds becomes one.
"""
