"""A queue between workers: one of them owns it, and any puts and gets.

The owner's process holds the items, pickled. They are lost with it, as in DLRover; the sample ledger of Gyre's own
recipes loses none.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from gyre_dlrover.api.runtime.rpc_helper import call_worker, export_rpc_instance, rpc
from gyre_dlrover.station import QUEUE_PREFIX, Invocation, here

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2
"""Between two attempts to put into a full queue; each is twice as long as the last."""


class DataQueueImpl:
    """The owner's part. Its methods return at once, and run beside whatever else the worker does."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[bytes] = deque()
        self._lock = threading.Lock()

    @rpc()
    async def qsize(self) -> int:
        return len(self._items)

    @rpc()
    async def put(self, items: list[bytes]) -> int:
        """Take as many of the items as there is room for, and return how many."""
        with self._lock:
            taken = items[: max(0, self._size - len(self._items))]
            self._items.extend(taken)
        return len(taken)

    @rpc()
    async def get(self, most: int) -> list[bytes]:
        """Give out at most so many items, the oldest first."""
        with self._lock:
            return [self._items.popleft() for _ in range(min(most, len(self._items)))]


class DataQueue(Generic[T]):
    """A queue by its name. The worker that makes it with `is_master` owns it; others wait until it is there."""

    def __init__(self, name: str, is_master: bool = False, size: int = 1000) -> None:
        key = f"{QUEUE_PREFIX}{name}"
        if is_master:
            export_rpc_instance(key, DataQueueImpl(size))
            owner = here().actor_info.name
            ask(REGISTER_QUEUE, name, owner)
        else:
            owner = str(ask(QUEUE_OWNER, name))
        self._key, self._owner = key, owner

    def qsize(self) -> int:
        """How many items are in it."""
        return int(self._ask_owner("qsize"))

    def put(self, *obj: T) -> None:
        """Put items, and wait while the queue is full."""
        left, pause_s = [pickle.dumps(one) for one in obj], FIRST_PAUSE_S
        while left:
            taken = self._ask_owner("put", left)
            left = left[taken:]
            if left:
                time.sleep(pause_s)  # whoever gets is elsewhere, and tells nobody
                pause_s = FIRST_PAUSE_S if taken else min(2 * pause_s, LONGEST_PAUSE_S)

    def put_async(self, *obj: T) -> Future[None]:
        """As `put`, in a thread of its own."""
        station = here()
        future: Future[None] = Future()

        def put() -> None:
            try:
                with station.entered():
                    self.put(*obj)
            except BaseException as error:  # whatever it is, whoever waits is told
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=put, name=f"dlrover-put-{self._key}", daemon=True).start()
        return future

    def get(self, batch_size: int) -> list[T]:
        """At most so many items; fewer, or none, where there are not as many."""
        return [pickle.loads(one) for one in self._ask_owner("get", batch_size)]

    def get_nowait(self, max_size: int = 1) -> list[T]:
        """As `get`."""
        return self.get(max_size)

    def _ask_owner(self, method: str, *args: Any) -> Any:
        return call_worker(self._owner, f"{self._key}.{method}", args, {}).result()


REGISTER_QUEUE, QUEUE_OWNER = "register_data_queue", "get_data_queue_owner"
"""What the job itself answers: it knows who owns which queue."""


def ask(method: str, *args: Any) -> Any:
    """Ask the job, and wait for its answer."""
    return here().caller.call(Invocation("", None, method, [(args, {})])).result()
