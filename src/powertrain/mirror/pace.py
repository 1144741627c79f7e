"""How fast an upload goes beside a training that needs every core."""

import time
from collections.abc import Callable

SHARE = 0.006                # of one core's time
CREDIT_S = 0.5               # of it that may be taken at once: small files need not wait
SHORTEST_REST_S, LONGEST_REST_S = 0.01, 0.5      # before it is looked whether the training is over


class Pace:
    """Holds this process, over all its threads, to SHARE of one core's time until the training is over.

    A training that uses all cores loses about a second for each second that another process takes of one of them, however low
    its priority is: the training's threads wait for each other.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._credit_s, self._used_s, self._looked_s = CREDIT_S, time.process_time(), time.monotonic()

    def rest(self) -> None:
        """Wait until what was taken is made up for. Called after each piece of work."""
        while not self._is_over() and (credit_s := self._count()) < 0:
            time.sleep(min(LONGEST_REST_S, SHORTEST_REST_S - credit_s / SHARE))

    def _count(self) -> float:
        used_s, now_s = time.process_time(), time.monotonic()
        self._credit_s = min(CREDIT_S, self._credit_s + SHARE * (now_s - self._looked_s)) - (used_s - self._used_s)
        self._used_s, self._looked_s = used_s, now_s
        return self._credit_s
