"""A job's numbers over time: what they are, how they are kept, and how they are read.

write_moment(store.series("j1"), numbers_of(state, telemetry), at=now)      # the master, each tick
read_series(store.series("j1"), prefix="instance", since=a, until=b, points=300)
"""

from gyre.observe.series.numbers import Numbers, numbers_of
from gyre.observe.series.reading import Series, read_series, spent_by_role
from gyre.observe.series.recording import Recorder
from gyre.observe.series.thinning import tick_for

__all__ = ["Numbers", "Recorder", "Series", "numbers_of", "read_series", "spent_by_role", "tick_for"]
