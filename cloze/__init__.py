"""Cloze: your own text as a sentence-embedding service. `encoding` is the contract between `training` and `service`.

In a notebook or a script:

    import cloze

    model = cloze.load()  # the model that comes with Cloze, or the folder of a bundle
    model.embed(["A man is playing the guitar."])  # float32, one row of unit length for each text
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from cloze.embedder import Embedder
    from cloze.service.settings import PrecisionChoice, ProviderChoice

__all__ = ["load"]


def load(
    bundle: "str | os.PathLike[str]" = "cloze-mini",
    *,
    precision: "PrecisionChoice" = "auto",
    provider: "ProviderChoice" = "auto",
    threads: int = 0,
) -> "Embedder":
    """Load a bundle to embed texts in this process. The vectors are the same as the service's.

    `bundle` is the folder of a bundle, or `cloze-mini`, the model that comes with Cloze. `threads` is the number of CPU
    threads that run the graph; 0 means all available CPUs. Raises ClozeError (cloze.encoding.errors), whose message
    says what was found and what to do next.
    """
    try:
        from cloze.embedder import Embedder  # imported here, so that `import cloze` is fast
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cloze"):
            raise
        from cloze.encoding.errors import ClozeError

        raise ClozeError(f"{error.name} is not installed; install the extra `cpu`, or `gpu`") from error
    return Embedder(bundle, precision=precision, provider=provider, threads=threads)
