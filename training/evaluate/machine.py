"""What a figure was measured with: a note of the machine, and the memory that it took."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["machine_note", "peak_memory"]


def peak_memory() -> int | None:
    """Bytes that this process has used at most; None where the system does not say, as on Windows."""
    status = Path("/proc/self/status")  # Linux's getrusage also counts the program that started this one
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="ascii"))):
        return 1024 * int(found[1])
    try:
        from resource import RUSAGE_SELF, getrusage  # here, because Windows has no such module
    except ImportError:
        return None
    peak: int = getrusage(RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, KiB elsewhere


def machine_note(models: Iterable[str], machines: Mapping[str, str]) -> str:
    """A sentence that names the machine of these models' speeds, or that of each if they were measured on several."""
    found: dict[str, list[str]] = {}
    for model in models:
        found.setdefault(machines.get(model, "a machine that was not recorded"), []).append(model)
    if len(found) == 1:
        return f"Machine: {next(iter(found))}."
    each = (f"{' and '.join(names)} on {machine}" for machine, names in found.items())
    return f"Machines: {'; '.join(each)}."
