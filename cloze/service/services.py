"""All parts of the application, in one object that create_app makes and every route receives."""

from dataclasses import dataclass

from cloze.service.inference.admission import Admission
from cloze.service.inference.health import Health
from cloze.service.inference.models import Models
from cloze.service.inference.threads import Executors
from cloze.service.monitoring.background import Background
from cloze.service.monitoring.metrics import Metrics
from cloze.service.monitoring.tracing import Tracing
from cloze.service.settings import Settings


@dataclass
class Traffic:
    """Counts of requests: in flight, answered to the last byte, and given up because the process had to stop.

    A request that is given up is answered with 503, except the `cut_short` ones, whose response had begun.
    """

    in_flight: int = 0
    answered: int = 0
    given_up: int = 0
    cut_short: int = 0
    stopping: bool = False


@dataclass(frozen=True)
class Services:
    """Attribute `services` of the application's state."""

    settings: Settings
    models: Models
    executors: Executors
    admission: Admission
    metrics: Metrics
    traffic: Traffic
    background: Background
    health: Health
    tracing: Tracing
