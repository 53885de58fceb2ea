"""How much memory a model will need on the CPU, from its files, so that it can be refused before it is loaded.

The constants were fitted to BERT and MPNet graphs of 22 to 436 MB, in int8 and fp32: the estimate for the process is 0
to 14 % above the most that it had until it was ready, and 5 to 28 % with `max_batch_tokens` 4096. It leaves out the
memory that requests need, and that of a GPU.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import OptionError
from cloze.service.inference.session import PROFILES, most_texts, suitable
from cloze.service.inference.threads import share_threads
from cloze.service.settings import Settings

GRAPH: Final = 1.1  # resident bytes for each of a graph's file
BATCH: Final = 2.2  # for each byte of the values that `_batch_bytes` counts
PROCESS: Final = 25 * 2**20  # what the service needs beside its models, once it serves
MIB: Final = 2**20


class Need(NamedTuple):
    """Bytes of one model's graph, and of its largest batches, whose memory models share."""

    graph: int
    batches: int


def need(bundle: Bundle, settings: Settings) -> Need:
    """Estimate what the graph of a loaded bundle takes on the CPU, beside its tokenizer.

    Where precisions race, each of their graphs is loaded first.
    """
    precisions = suitable(bundle, "cpu") if settings.precision == "auto" else (settings.precision,)
    graphs = sum(bundle.graph(precision).stat().st_size for precision in precisions)
    threads = share_threads(settings.threads)
    tokens = settings.max_batch_tokens or PROFILES["cpu"].batch_tokens * threads.per_batch
    batches = threads.batches * _batch_bytes(bundle, tokens)
    return Need(round(GRAPH * graphs), round(BATCH * batches))


def resident(status: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of memory that this process has now; None where the system is not Linux."""
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


def check(settings: Settings, bundles: Iterable[Bundle], served: Iterable[Bundle] = ()) -> None:
    """Raise OptionError, which names the first model that does not fit, where `max_memory_mb` is set and too small.

    `served` are loaded already: their memory is part of the process's, and their batches' is shared.
    """
    limit = settings.max_memory_mb * MIB
    if not limit or settings.provider == "cuda":
        return
    now = resident() or 0
    graphs, batches, shared = 0, 0, max((need(bundle, settings).batches for bundle in served), default=0)
    for bundle in bundles:
        found = need(bundle, settings)
        graphs, batches = graphs + found.graph, max(batches, found.batches - shared)
        total = now + PROCESS + settings.cache_mb * MIB + graphs + batches
        if total > limit:
            raise OptionError(
                f"model {bundle.name} would not fit: with it the process needs about {total / MIB:.0f} MiB, and "
                f"max_memory_mb is {settings.max_memory_mb}; raise it, lower max_batch_tokens or cache_mb, or serve "
                "fewer or smaller models"
            )


def _batch_bytes(bundle: Bundle, tokens: int) -> int:
    """Bytes in float32 of one layer's values for the largest batch: its tokens' vectors, and the scores of attention.

    A configuration that does not say its sizes is given those of a BERT of the bundle's dimension.
    """
    config = json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))
    hidden = int(config.get("hidden_size") or bundle.spec.dimension)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    heads = int(config.get("num_attention_heads") or -(-hidden // 64))
    length = len(bundle.text_encoder.longest)
    return 4 * most_texts(bundle.text_encoder, tokens) * length * (hidden + inner + heads * length)
