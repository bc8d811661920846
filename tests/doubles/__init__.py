"""What Gyre's own tests run over instead of machines: a cluster in memory, a job under the real master over it, faults.

Doubles that users' tests need are in `gyre.testing`, which every wheel has; these are in none.
"""
