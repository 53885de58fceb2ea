"""Who sends a request, and in which class. The queue, the limits, the log and the metrics use it."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Priority = Literal["interactive", "bulk"]

STRIDES: Final[Mapping[Priority, int]] = {"interactive": 1, "bulk": 64}  # added to a class's tag for each token


class Client(NamedTuple):
    """Who sends a request, and in which class. The same name in two classes is two clients."""

    name: str
    priority: Priority = "interactive"
