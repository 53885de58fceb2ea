"""`cloze doctor`: what this machine offers, for an operator and for the report of a problem.

It prints facts, but no texts, no paths of the user and no environment. It loads a bundle as the service does, with the
same checks, and times it for a second. Its last line is `ready`, or one next step.
"""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

import onnxruntime as ort
from pydantic import Field

from cloze.command import run
from cloze.encoding.bundle import Bundle, default_bundle
from cloze.machine import available_cpus, memory_limit, processor, resident_memory, versions
from cloze.options import Options
from cloze.service import VERSION
from cloze.service.__main__ import limit_free_memory
from cloze.service.inference.session import Session, run_largest
from cloze.service.inference.threads import share_threads
from cloze.service.settings import PrecisionChoice, ProviderChoice

PACKAGES: Final = ("onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "fastapi", "uvicorn", "ray", "pyarrow")
TRAINING: Final = ("torch", "transformers", "sentence-transformers", "onnx", "datasets")
SECONDS: Final = 1.0
DRIVERS: Final = Path("/proc/driver/nvidia/gpus")
TEXTS: Final = 8
TOKENS: Final = 32

Fact = tuple[str, str]


class DoctorOptions(Options):
    """Show this machine's processor, memory, GPU and package versions, and how fast it runs a bundle.

    The last line is "ready", or the next step to take.
    """

    bundle: Path | None = Field(
        None, description="bundle to load, check and time for one second; unset: the model that comes with Cloze"
    )
    precision: PrecisionChoice = Field(
        "auto", description="graph of the bundle to run; auto: the fastest on this machine"
    )
    provider: ProviderChoice = Field("auto", description="where to run it; auto: CUDA where it is available")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = DoctorOptions.parse(arguments, "cloze doctor")
    for name, value in _facts(options):
        print(f"{name + ':':12}{value}", flush=True)
    print(_verdict(options))


def _facts(options: DoctorOptions) -> Iterator[Fact]:
    yield "cloze", f"{VERSION}, Python {platform.python_version()}, {platform.platform()}"
    yield "processor", processor()
    threads = share_threads(0)
    batches = f"{threads.batches} batches at a time of {threads.per_batch} threads each"
    yield "CPUs", f"{available_cpus()} of {os.cpu_count()} are available: {batches}"
    yield "memory", _memory(limit=memory_limit())
    yield "packages", _versions(PACKAGES)
    yield "training", _versions(TRAINING)
    yield "GPU", _gpu()
    if path := options.bundle or default_bundle():
        yield from _of_bundle(options, path)


def _memory(status: Path = Path("/proc/meminfo"), limit: int | None = None) -> str:
    """In GiB: the total, the available part if the system reports it, and the limit of a container."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return "not known here"
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    parts = [(total, ""), (free, " of it available"), (limit, " allowed to this container")]
    return ", ".join(f"{size / 2**30:.1f} GiB{note}" for size, note in parts if size is not None)


def _versions(packages: Sequence[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions(packages).items()) or "none is installed"


def _gpus(drivers: Path) -> list[str]:
    """The names of the NVIDIA devices; none without the driver."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(drivers.glob("*/information"))]
    return [line.partition(":")[2].strip() for text in texts for line in text.splitlines() if line.startswith("Model")]


def _gpu(drivers: Path = DRIVERS) -> str:
    """The devices, and the providers that ONNX Runtime offers."""
    gpus = ", ".join(_gpus(drivers)) or "no NVIDIA driver"
    return f"{gpus}; ONNX Runtime offers {', '.join(ort.get_available_providers())}"


def _verdict(options: DoctorOptions, drivers: Path = DRIVERS) -> str:
    """`ready`, or what to do first. A bundle that cannot be loaded has raised an error with its own next step."""
    if (options.bundle or default_bundle()) is None:
        return "next: give a bundle, such as one that cloze export made: cloze doctor --bundle PATH"
    if options.provider != "cpu" and _gpus(drivers) and "CUDAExecutionProvider" not in ort.get_available_providers():
        return (
            "next: the GPU is not used; replace onnxruntime: pip uninstall -y onnxruntime onnxruntime-gpu && pip "
            "install '.[gpu]' in a clone of Cloze"
        )
    return "ready"


def _of_bundle(options: DoctorOptions, path: Path) -> Iterator[Fact]:
    """Load, check and time a bundle. Raises BundleError, SessionError."""
    limit_free_memory()  # as the service does
    started, threads = perf_counter(), share_threads(0)
    bundle = Bundle.load(path)
    memory_before = resident_memory()
    yield "bundle", f"{bundle.spec.template!r}, pooling {bundle.spec.pooling}, {', '.join(bundle.precisions)}"
    session = Session.load(bundle, precision=options.precision, provider=options.provider, threads=threads.per_batch)
    seconds = perf_counter() - started
    yield "graph", f"{session.precision} on {session.provider}, loaded and checked in {seconds:.2f} s"
    encoder = bundle.text_encoder
    if session.provider == "cpu" and memory_before is not None:
        run_largest(session, encoder, session.batches.tokens, threads.batches)
        memory_taken = (resident_memory() or memory_before) - memory_before
        yield "takes", f"{memory_taken / 2**20:.0f} MiB, the process {memory_before / 2**20:.0f} before"
    length = min(TOKENS, encoder.max_tokens)
    batch, runs, started = encoder.pad([encoder.longest[:length]] * TEXTS), 0, perf_counter()
    while perf_counter() < started + SECONDS:
        session.run(batch)
        runs += 1
    speed = runs * TEXTS / (perf_counter() - started)
    yield "speed", f"{speed:.0f} texts of {length} tokens a second, one batch of {TEXTS} at a time"


if __name__ == "__main__":
    sys.exit(run(main))
