"""Hostile input for every place where bytes of strangers come in: `python -m tests.fuzz`, or `make fuzz`.

| file | what it is for |
| --- | --- |
| `inputs.py` | hostile values, and ways to damage good ones |
| `target.py` | what a target is, and `run`, which feeds one and judges it |
| one file a target | a place where bytes come in, over the real code |
| `test_fuzz.py` | a few cases of each target, with the ordinary tests |

Invariant *repeatable*: a case is a function of the target's name, the seed and its index. A failure prints the line
that runs that case alone.
"""
