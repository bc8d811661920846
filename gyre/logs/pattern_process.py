"""The process that looks for a user's regular expression in lines, and is ended by the kernel if that takes too long.

    python -I -S pattern_process.py CPU_S MEMORY_BYTES

On stdin is a JSON list of the expression and the lines; on stdout comes a list of true and false.

Invariant *bounded*: it has so much time of a core and so much memory. It runs by its path and imports nothing of Gyre.
"""

import json
import re
import resource
import sys


def main(cpu_s: int, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    pattern, lines = json.load(sys.stdin)
    compiled = re.compile(pattern)
    json.dump([compiled.search(line) is not None for line in lines], sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
