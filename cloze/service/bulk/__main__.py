"""`cloze bulk IN OUT --bundle B`: embed the texts of files into parquet files."""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, SecretStr
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.encoding.bundle import DEFAULT, GRAPHS, Bundle, Precision
from cloze.encoding.errors import OptionError
from cloze.encoding.text import TOKENIZER_FILES
from cloze.options import Options, key_of
from cloze.service.settings import PrecisionChoice

if TYPE_CHECKING:
    from cloze.service.bulk.output import Counts, Output
    from cloze.service.bulk.source import Source

SOME_FAILED: Final = 3  # exit status if some rows have no vector
INCOMPLETE: Final = 1  # exit status of --check if some rows are not processed yet


class BulkOptions(Options):
    """Embed the texts in files and write parquet files, on this machine or on a Ray cluster.

    To resume an interrupted job, run the same command again. The exit status is 3 if some rows have no vector; the
    folder `errors` in OUT lists them with the reasons.
    """

    input: CliPositionalArg[str] = Field(
        description="A file, a folder, a glob pattern or a URL: .parquet, .jsonl, .csv, .tsv, .txt, also with .gz, "
        ".bz2, .xz or .zst"
    )
    out: CliPositionalArg[str] = Field(description="The folder to write, or its URL")
    bundle: Path = Field(
        Path(DEFAULT),
        description="Folder of the bundle, at the same path on every node. cloze-mini: the model that comes with Cloze",
    )
    text_column: str = Field("text", description="Column that contains the texts")
    id_column: str | None = Field(
        None, description="Column that identifies each row. Unset: a column id with FILE:ROW is added"
    )
    columns: CliVariadicArg[list[str]] = Field([], description="Further columns to keep. Unset: all")
    prompt_name: str | None = Field(None, description="Name of one of the bundle's templates, such as document")
    dtype: Literal["float32", "float16", "int8", "binary"] = Field(
        "float32", description="Type of the vector components: float32, float16, int8, or binary (one bit each)"
    )
    dimensions: int | None = Field(None, ge=1, description="Keep only this many leading dimensions, before normalising")
    normalize: bool = Field(True, description="Scale each vector to length 1")
    auto_truncate: bool = Field(True, description="Truncate texts that are too long. Otherwise they get no vector")
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Split longer texts into chunks of at most this many tokens, and use the mean of the chunks' "
        "vectors",
    )
    server: str = Field(
        "",
        description="URL of a running service with the same bundle, which computes the vectors. It gives priority to "
        "interactive requests",
    )
    key_file: Path | None = Field(None, description="File with an API key for that service")
    precision: PrecisionChoice = Field("auto", description="Graph to run. auto: the fastest on this machine")
    rows_per_file: int = Field(8192, ge=1, le=1_000_000, description="Rows per parquet file")
    address: str | None = Field(
        None,
        description="Ray cluster that this machine belongs to: auto, or HOST:6379 of its head node. Unset: this "
        "machine only",
    )
    worker_cpus: int = Field(0, ge=0, description="CPUs per worker. 0: as many as the smallest node has, at most 4")
    worker_gpus: float = Field(
        0, ge=0, description="GPUs per worker, which may be a fraction. 0: the graph runs on the CPU"
    )
    workers: int = Field(0, ge=0, description="Maximum number of workers. 0: as many as fit")
    check: bool = Field(
        False, description="Only report whether OUT is complete, and embed nothing. Exit status 1 if it is not"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return SOME_FAILED if the job is done except for some rows. Raises ClozeError if it cannot be done."""
    options = BulkOptions.parse(arguments, "cloze bulk")
    return _check(options) if options.check else _embed(options)


def _embed(options: BulkOptions) -> int:
    from cloze.service.bulk import job  # importing Ray takes seconds, which --help does not need
    from cloze.service.bulk.embed import Embed
    from cloze.service.bulk.lock import Lock
    from cloze.service.bulk.output import Counts
    from cloze.service.bulk.progress import show
    from cloze.service.bulk.workers import resources

    bundle, source, output = _checked(options)
    with Lock(output.filesystem, output.root) as lock:
        precision = _precision(options, bundle, output.manifest())
        vectors = _vectors(options) | {"precision": precision}
        output.begin(_manifest(bundle, source, vectors))
        complete = output.finished()
        earlier = Counts.total(complete.values())
        started = perf_counter()
        with job.connection(options.address):
            waiting = int(bool(options.server))  # one worker with one CPU is enough to send requests
            allocation = resources(
                options.worker_cpus or waiting,
                options.worker_gpus,
                options.workers or waiting,
                wait=bool(options.address),
            )
            vectors |= {"provider": "cuda" if allocation.gpus else "cpu", "threads": allocation.cpus}
            vectors |= {"server": options.server, "key": _key(options)}
            make = partial(Embed, bundle.path.absolute(), **vectors)
            parts = lock.guard(job.run(make, source, output, allocation, complete))
            counts, seconds = show(parts, sum(file.size for file in source.files), earlier)
            engine = perf_counter() - started - seconds
    return _report(options.out, counts, earlier, seconds, engine)


def _check(options: BulkOptions) -> int:
    """Print how much of the job is done. Return 0, SOME_FAILED if some rows have no vector, or INCOMPLETE."""
    from cloze.service.bulk.output import Counts

    bundle, source, output = _checked(options)
    former = output.manifest()
    if former is None:
        raise OptionError(f"{options.out} has no job to check; start one without --check")
    local = options.model_copy(update={"server": ""})  # nothing is embedded
    vectors = _vectors(options) | {"precision": _precision(local, bundle, former)}
    output.check_same(former, _manifest(bundle, source, vectors))
    complete = output.finished()
    counts = Counts.total(complete.values())
    complete_numbers = [
        {number for part_file, number in complete if part_file == file} for file in range(len(source.files))
    ]
    parts = chain.from_iterable(
        source.parts(file, numbers.__contains__) for file, numbers in enumerate(complete_numbers)
    )
    missing = sum(len(part.table) + len(part.failures) for part in parts)
    print(f"{counts.rows} rows have vectors, {counts.failed} failed permanently, {missing} are still to be embedded")
    return INCOMPLETE if missing else SOME_FAILED if counts.failed else 0


def _manifest(bundle: Bundle, source: "Source", vectors: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the job: the model, how its vectors are made, and the rows."""
    return {"model": _identity(bundle, vectors["precision"]), **vectors, **source.identity()}


def _checked(options: BulkOptions) -> "tuple[Bundle, Source, Output]":
    """Check everything that can be checked before anything is written and Ray starts."""
    from cloze.service.bulk.embed import check_chunks
    from cloze.service.bulk.output import Output
    from cloze.service.bulk.source import Source

    if options.key_file and not options.server:
        raise OptionError("--key-file is used only with --server; give --server, or omit --key-file")
    bundle = Bundle.load(options.bundle)
    bundle.check_dimensions(options.dimensions)
    check_chunks(options.chunk_tokens, bundle.encoder_of(options.prompt_name))
    if options.precision != "auto":
        bundle.graph(options.precision)
    output = Output.at(options.out, options.rows_per_file)
    source = Source.find(
        options.input,
        text_column=options.text_column,
        id_column=options.id_column,
        columns=tuple(options.columns),
        rows_per_part=options.rows_per_file,
        out=output.root,
    )
    return bundle, source, output


def _vectors(options: BulkOptions) -> dict[str, Any]:
    return {
        "text_column": options.text_column,
        "prompt_name": options.prompt_name,
        "dtype": options.dtype,
        "dimensions": options.dimensions,
        "normalize": options.normalize,
        "truncate": options.auto_truncate,
        "chunk_tokens": options.chunk_tokens,
    }


def _report(out: str, counts: "Counts", earlier: "Counts", seconds: float, engine: float) -> int:
    """Print what was done, and return the exit status. `engine` is the seconds that Ray took."""
    print(
        f"embedded {counts.rows} rows with {counts.tokens} tokens ({counts.truncated} truncated) in {seconds:.1f} s, "
        f"{counts.rows / max(seconds, 1e-9):.0f} rows/s; starting Ray and its workers took {engine:.1f} s"
    )
    if earlier.rows or earlier.failed:
        print(f"{earlier.rows} rows already had vectors from an earlier start")
    if failed := earlier.failed + counts.failed:
        print(f"{failed} rows have no vector; {out}/errors says which, and why")
        return SOME_FAILED
    return 0


def _precision(options: BulkOptions, bundle: Bundle, former: dict[str, Any] | None) -> Precision:
    """Return one precision for all workers: vectors of two precisions are close but not the same."""
    from cloze.service.bulk.remote import Remote
    from cloze.service.inference.session import Session

    if options.server:
        served = Remote(options.server, _key(options), bundle).precision
        if options.precision not in ("auto", served):
            raise OptionError(f"precision is {options.precision}, but {options.server} runs {served}; omit --precision")
        return served
    if options.precision != "auto":
        return _on_cuda(bundle, [options.precision]) if options.worker_gpus else options.precision
    if former is not None and former.get("precision") in GRAPHS:
        precision: Precision = former["precision"]
        return precision
    if options.worker_gpus:
        return _on_cuda(bundle, bundle.precisions)
    return Session.load(bundle, provider="cpu", threads=1).precision


def _on_cuda(bundle: Bundle, choices: Sequence[Precision]) -> Precision:
    """Return the best of these precisions that a GPU can run. Raises OptionError, before workers are started."""
    from cloze.service.inference.session import PROFILES

    for precision in PROFILES["cuda"].precisions:
        if precision in choices:
            return precision
    raise OptionError(
        f"--worker-gpus: CUDA has no kernel for the matrix products of {', '.join(choices)}; make a bundle in fp16 and "
        f"embed with it: `cloze export {bundle.path} OUT --precision fp16`"
    )


def _key(options: BulkOptions) -> SecretStr:
    return SecretStr(key_of(options.key_file))


def _identity(bundle: Bundle, precision: Precision) -> dict[str, Any]:
    """Return what determines a bundle's vectors, for the output folder's record of the job."""
    spec = bundle.spec
    files = {name: spec.files.get(name) for name in (GRAPHS[precision], *TOKENIZER_FILES)}  # or another model's job
    options = {
        "embedding_space": spec.space,
        "template": spec.template,
        "max_tokens": spec.max_tokens,
        "final_period": spec.final_period,
    }
    return options | {"sha256": files}


if __name__ == "__main__":
    sys.exit(run(main))
