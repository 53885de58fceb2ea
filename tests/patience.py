"""The one time limit of the tests. They wait for events, and only a hang runs out of it."""

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds


def wait_until(condition: Callable[[], object], otherwise: Callable[[], str] = lambda: "it never came true") -> None:
    """Wait for what another thread or process will do; `otherwise` is what the test says if that never happens."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.02)
