#!/bin/bash
# The job at the size that people have, with one of each kind of process killed in turn: bench/job_plane/plans/size.txt.
#
#     bench/size_gpu.sh OUT [arguments of job_gpu.py, as --total 580, --dry-run, --set rollouts.engine_python=…]
#
# OUT gets results.json, from the first event on, and a small zip file of each job. What is measured is kept in
# SIZE_KEPT too, so that the next call on this machine goes on with what is missing, whatever OUT it has.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?a folder for the results}
kept=${SIZE_KEPT:-${TMPDIR:-/tmp}/gyre_size}
shift
mkdir -p "$out" "$kept/details"
[ -f "$kept/results.json" ] && cp "$kept/results.json" "$out/"
trap 'cp "$out/results.json" "$kept/"' EXIT
"${PYTHON:-python}" "$here/job_gpu.py" --out "$out" --details "$kept/details" \
    --plan "$here/job_plane/plans/size.txt" --missing "$@"
