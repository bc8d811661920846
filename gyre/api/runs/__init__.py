"""The table of runs: its columns, the grammar that filters them, its order, its groups, and CSV.

What the page, the command line and REST show of many jobs is made here, of the items of `JobReader.jobs`. Pure: `now`
is an argument. This package must not know a store, HTTP or a terminal.
"""

from gyre.api.runs.columns import COLUMNS, RunColumn, column_named
from gyre.api.runs.csv_text import csv_of_curves, csv_of_runs
from gyre.api.runs.filters import parse_filter
from gyre.api.runs.naming import NAMED, named
from gyre.api.runs.table import GROUPS, GroupedRuns, cost_words, grouped, ordered, select_runs, shared_names

__all__ = [
    "COLUMNS",
    "GROUPS",
    "NAMED",
    "GroupedRuns",
    "RunColumn",
    "column_named",
    "cost_words",
    "csv_of_curves",
    "csv_of_runs",
    "grouped",
    "named",
    "ordered",
    "parse_filter",
    "select_runs",
    "shared_names",
]
