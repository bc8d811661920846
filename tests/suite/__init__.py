"""How this repository's tests are run: `python -m tests.suite PART…`, by `make test` and `make test-long`.

A part is a named share of the tests (`parts.py`). It is cut into bundles: tests of a few folders, which one pytest
process collects and runs, beside others. What a process recorded (`recorder.py`) is folded to a verdict (`verdict.py`),
which neither starts processes nor reads a clock.

Invariants:
- *no green of nothing*: a bundle that runs no test, a part that does not end in time and a process that dies are red;
- *twice is red*: what failed is run once more by itself, after its process and all that it left have ended; what passes
  then is a flake, which is counted and written down, and above `MOST_FLAKES` of them the run is red;
- *nothing outlives its bundle*: a bundle's processes end with it, also those in sessions of their own (`reaper.py`).
"""
