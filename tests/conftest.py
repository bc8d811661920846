"""What every test starts from."""

from __future__ import annotations

import signal

# A suite that is started in the background inherits an ignored SIGINT, and so would every process that its tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
