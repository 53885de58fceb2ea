"""A bundle: a folder that contains everything needed to turn a text into a vector.

    config.json                 the encoder's architecture
    canaries.json               ten texts and their vectors; bundles older than format 3 have none
    calibration.json            what a cosine means, which `cloze calibrate` adds
    heads/NAME.json             classifiers on the vectors, which `cloze head` adds
    tokenizer.json, tokenizer_config.json
    onnx/model.onnx             fp32; and/or model_fp16.onnx, model_int8.onnx
    README.md                   the model card
    embedding.json              the contract: `Spec`, with the sha256 of every file above; written last

A graph takes `input_ids` and `attention_mask`, int64 (batch, length), and gives `sentence_embedding`, float32
(batch, dimension), not normalised. The graph contains the whole model. This module does not run graphs.
"""

import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from cloze.encoding.calibration import CALIBRATION_FILE, Calibration
from cloze.encoding.canaries import CANARY_FILE, Canaries
from cloze.encoding.errors import BundleError, OptionError, TemplateError
from cloze.encoding.files import check_folder, exchange, write_whole
from cloze.encoding.heads import HEAD_FOLDER, ClassifierHead
from cloze.encoding.template import MASK, PoolingMode, Template
from cloze.encoding.text import TOKENIZER_FILES, TextEncoder

DEFAULT: Final = "cloze-mini"  # the model that comes with Cloze
FORMAT_VERSION: Final = 3
SPEC_FILE: Final = "embedding.json"
INPUTS: Final = ("input_ids", "attention_mask")
OUTPUT: Final = "sentence_embedding"
SEARCH_NAMES: Final = ("query", "document")  # the named templates that search uses, if a model has them

Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GRAPHS: dict[Precision, str] = {
    "fp32": "onnx/model.onnx",
    "fp16": "onnx/model_fp16.onnx",
    "int8": "onnx/model_int8.onnx",
}
DTYPES: Final[dict[Precision, str]] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}  # as /info reports them
REQUIRED_FILES: Final = ("config.json", *TOKENIZER_FILES, "README.md")
EXPORT_COMMAND: Final = "cloze export RUN OUT"
RESTORE: Final = f"restore it or export again: `{EXPORT_COMMAND}`"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Source(_Record):
    """One file of training text."""

    name: str
    sentences: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Provenance(_Record):
    """Where the model comes from.

    Three dictionaries have one entry per precision. `scores` has the scores of a suite ({"int8": {"STS12": 73.1, …}}),
    `parity` the largest absolute difference between torch's vectors and the graph's, relative to the longest vector,
    and `graphs` how the graph was made.
    """

    parent: str
    recipe: dict[str, Any]
    data: list[Source]
    commit: str | None
    seeds: list[int]
    scores: dict[str, dict[str, float]]
    parity: dict[str, float]
    graphs: dict[str, str] = Field(default_factory=dict)


class EmbeddingConfig(_Record):
    """How a text becomes token ids and how its vector is pooled. A trained model and its bundle share this.

    `templates` has named templates for texts of one kind, such as queries; `template` is for all others.
    """

    template: str
    templates: dict[str, str] = Field(default_factory=dict)
    pooling: PoolingMode
    max_tokens: Annotated[int, Field(ge=3)]
    final_period: bool
    denoising: bool

    def text_encoder(self, folder: Path) -> TextEncoder:
        """Return an encoder for this configuration and the tokenizer in `folder`. Raises TemplateError, BundleError."""
        template = Template.parse(self.template, self.pooling)
        return TextEncoder.load(folder, template, self.max_tokens, self.final_period)

    def named_encoders(self, text_encoder: TextEncoder) -> dict[str, TextEncoder]:
        """Return an encoder for each named template, with the tokenizer of `text_encoder`.

        Raises TemplateError if [MASK] is not at the place where the graph reads it.
        """
        encoders = {}
        for name, source in self.templates.items():
            encoder = text_encoder.within(Template.parse(source, self.pooling))
            if encoder.mask_index != text_encoder.mask_index:
                raise TemplateError(
                    f"template {name} {source!r} has {MASK} at position {encoder.mask_index}, but template "
                    f"{self.template!r} has it at {text_encoder.mask_index}; write the same words between {MASK} and "
                    "the nearer end"
                )
            if self.denoising:
                raise TemplateError(
                    f"template {name} {source!r}: denoising subtracts the vector of one template, so the bundle cannot "
                    "have another template; export without denoising"
                )
            encoders[name] = encoder
        return encoders


class Spec(EmbeddingConfig):
    """`embedding.json`: the embedding configuration, the graph's inputs, output and dimension, and all digests.

    `weights` is the digest of the weights that the graphs of all precisions were made from.
    """

    format_version: Literal[3]
    dimension: Annotated[int, Field(ge=1)]
    inputs: tuple[Literal["input_ids"], Literal["attention_mask"]]
    output: Literal["sentence_embedding"]
    weights: Sha256
    files: dict[str, Sha256]
    provenance: Provenance

    @property
    def space(self) -> str:
        """Return a short digest of everything that determines a vector except the precision: 16 hexadecimal digits.

        Vectors of two different spaces must not be compared.
        """
        parts = (
            self.weights,
            self.template,
            sorted(self.templates.items()),
            self.final_period,
            self.denoising,
            self.pooling,
            self.dimension,
            [self.files.get(name) for name in TOKENIZER_FILES],
        )
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files have been checked."""

    path: Path
    spec: Spec
    text_encoder: TextEncoder
    named: dict[str, TextEncoder]  # by name, as in the spec's `templates`
    created: int  # when it was written, in seconds since 1970
    stamps: dict[str, tuple[int, int]]  # size and modification time of every file, before it was read

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a bundle and check every file.

        Raises BundleError, which names the missing, altered or unreadable file and the next step.
        """
        folder = locate(path)
        try:
            spec = _read_spec(folder)
            created = int((folder / SPEC_FILE).stat().st_mtime)
            stamps = _check_files(folder, spec)
            encoder = spec.text_encoder(folder)
            named = spec.named_encoders(encoder)
        except TemplateError as error:
            raise BundleError(f"{folder / SPEC_FILE}: {error}") from error
        except OSError as error:
            raise unreadable(folder, error) from error
        return cls(folder, spec, encoder, named, created, stamps)

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.path)).name  # the link's own name, so that its target may change

    def encoder_of(self, prompt_name: str | None) -> TextEncoder:
        """Return the encoder of a named template, or of the bundle's own. Raises OptionError."""
        if prompt_name is None:
            return self.text_encoder
        if prompt_name not in self.named:
            names = ", ".join(self.named) or "none"
            raise OptionError(f"prompt_name is {prompt_name!r}; the named templates of {self.name} are: {names}")
        return self.named[prompt_name]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise OptionError if the bundle does not have that many dimensions."""
        limit = self.spec.dimension
        whole = isinstance(dimensions, Integral) and not isinstance(dimensions, bool)
        if dimensions is not None and not (whole and 1 <= dimensions <= limit):
            raise OptionError(f"dimensions is {dimensions}; {self.name} has {limit}: ask for 1 to {limit}")

    def copy(self, folder: Path) -> None:
        """Copy the bundle's files, except the contract, into a folder."""
        for name in self.spec.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.path / name, folder / name)  # with its mode

    def unchanged(self) -> bool:
        """Whether the contract and the files are still those that were loaded. Raises BundleError."""
        try:
            same_stamps = all(_stamp(self.path / name) == stamp for name, stamp in self.stamps.items())
            return same_stamps and _read_spec(self.path) == self.spec
        except OSError as error:
            raise unreadable(self.path, error) from error

    @property
    def canaries(self) -> Canaries | None:
        """The canary texts and their vectors. Raises BundleError."""
        return Canaries.read(self.path) if CANARY_FILE in self.spec.files else None

    @property
    def calibration(self) -> Calibration | None:
        """What a cosine of the bundle's vectors means. Raises BundleError."""
        return Calibration.read(self.path) if CALIBRATION_FILE in self.spec.files else None

    @property
    def heads(self) -> dict[str, ClassifierHead]:
        """The classifiers on the bundle's vectors, by name. Raises BundleError."""
        paths = [PurePosixPath(name) for name in self.spec.files]
        return {
            path.stem: ClassifierHead.read(self.path / path, self.spec.dimension)
            for path in sorted(paths)
            if path.parts[:-1] == (HEAD_FOLDER,) and path.suffix == ".json"
        }

    @property
    def precisions(self) -> tuple[Precision, ...]:
        return tuple(precision for precision in PRECISIONS if GRAPHS[precision] in self.spec.files)

    def graph(self, precision: Precision) -> Path:
        """Return the path of one precision's graph. Raises BundleError if the bundle has none."""
        if precision not in self.precisions:
            raise BundleError(
                f"{self.path} has no {precision} graph, only {', '.join(self.precisions)}; choose one of these, "
                f"or make it with `{EXPORT_COMMAND} --precision {precision}`"
            )
        return self.path / GRAPHS[precision]


def learnt_parts(out: Path) -> str | None:
    """The warning before another model's bundle replaces the one at `out`: its heads and its calibration are lost."""
    if (out / HEAD_FOLDER).is_dir() or (out / CALIBRATION_FILE).is_file():
        return f"{out}: its heads and its calibration do not fit the new model; learn them again (docs/upgrade.md)"
    return None


@contextmanager
def staging(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to build a bundle in. It replaces `out` at the end of the block, and is removed after an error.

    If the system can exchange two folders in one step, `out` is a complete bundle at any time. Otherwise `out` is
    missing for microseconds between two renames, and a process that is killed then leaves the previous bundle in a
    folder beside it. `out` may be absent, empty or a bundle, whose other files, such as git's, are kept. Raises
    BundleError, before any work, if it is anything else.
    """
    target = Path(out).resolve()  # a link stays a link
    if target.exists() and not _replaceable(target):
        raise BundleError(f"{target} exists and is not a bundle; choose another folder or remove it")
    _check_place(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workshop_folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise BundleError(f"{target} cannot be made ({error.strerror}); choose another folder") from error
    with workshop_folder as workshop:
        folder, former = Path(workshop, "new"), Path(workshop, "old")
        folder.mkdir()
        yield folder
        _keep_others(target, folder)
        if target.exists() and exchange(folder, target):
            return
        if target.exists():
            target.rename(former)
        try:
            folder.rename(target)
        except BaseException:
            if former.exists():
                former.rename(target)
            raise


def _keep_others(former: Path, folder: Path) -> None:
    """Copy to `folder` the files of a former bundle's folder that its contract does not list. If the contract is
    damaged, only hidden ones, because the others may be the bundle's. Raises BundleError.
    """
    try:
        own = set(json.loads((former / SPEC_FILE).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        own = None
    try:
        for path in former.rglob("*"):
            relative = path.relative_to(former)
            target, hidden = folder / relative, relative.parts[0].startswith(".")
            if path.is_symlink() or path.is_file():
                if (hidden if own is None else relative.as_posix() not in own) and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target, follow_symlinks=False)
            elif hidden:
                target.mkdir(parents=True, exist_ok=True)  # git needs its empty folders
    except OSError as error:
        raise BundleError(
            f"{error.filename or former} cannot be copied beside the new bundle ({error.strerror}); choose another "
            "folder"
        ) from error


def seal(folder: Path, config: EmbeddingConfig, dimension: int, weights: str, provenance: Provenance) -> Spec:
    """Hash every file in `folder`, and then write the contract atomically, which makes the folder a bundle.

    `weights` is the sha256 of the weights that the graphs were made from.
    """
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    spec = Spec(
        **config.model_dump(),
        format_version=FORMAT_VERSION,
        dimension=dimension,
        inputs=INPUTS,
        output=OUTPUT,
        weights=weights,
        files={name: sha256(folder / name) for name in files if name != SPEC_FILE},
        provenance=provenance,
    )
    text = json.dumps(spec.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / SPEC_FILE, text)
    return spec


def _check_place(folder: Path) -> None:
    """Raise BundleError if a folder cannot be replaced, or if the working directory is in it and would be replaced."""
    if folder.is_mount():
        raise BundleError(f"{folder} is a mount point, which cannot be replaced; name a folder in it")
    if Path.cwd().is_relative_to(folder):
        raise BundleError(
            f"{folder} is the working directory or holds it, and would be replaced; change to another folder first"
        )


def load_to_change(name: str | os.PathLike[str]) -> Bundle:
    """Load a bundle to change after long work. Raises BundleError, also for the bundle of the installation."""
    bundle = Bundle.load(Path(name))
    if bundle.path != Path(name):
        raise BundleError(
            f"{name} is part of the installation, and would be changed in place; copy it, and name the copy: "
            f"cp -r {shlex.quote(str(bundle.path))} my-{name}"
        )
    folder = bundle.path.resolve()
    _check_place(folder)
    try:
        check_folder(folder.parent)
    except OptionError as error:
        raise BundleError(
            f"{bundle.path} cannot be replaced by its changed copy: {error}, and copy the bundle there"
        ) from error
    return bundle


@contextmanager
def changing(bundle: Bundle, provenance: Provenance | None = None) -> Iterator[Path]:
    """Yield a copy of a bundle's folder to change. At the end of the block, it is sealed and replaces the bundle.

    The graphs and everything that determines a vector must not change. `provenance` replaces the bundle's own. Raises
    BundleError if the bundle was replaced meanwhile.
    """
    spec = bundle.spec
    with staging(bundle.path) as folder:
        if not bundle.unchanged():
            raise BundleError(f"{bundle.path} was replaced after it was read; run the command again")
        bundle.copy(folder)
        yield folder
        config = EmbeddingConfig.model_validate(spec.model_dump(include=set(EmbeddingConfig.model_fields)))
        seal(folder, config, spec.dimension, spec.weights, provenance or spec.provenance)


def upgrade(content: Any) -> Any:
    """Return an embedding configuration, or a complete contract, in the current format.

    In version 1 it called `pooling` `read_out`. Version 2 had no `weights`: a digest of the graphs' digests is used.
    """
    if not isinstance(content, dict):
        return content
    content = {"pooling" if key == "read_out" else key: value for key, value in content.items()}
    if content.get("format_version") in (1, 2) and isinstance(content.get("files"), dict):
        graphs = [content["files"].get(graph) for graph in GRAPHS.values()]
        weights = hashlib.sha256(json.dumps(graphs).encode()).hexdigest()
        content |= {"format_version": FORMAT_VERSION, "weights": weights}
    return content


def default_bundle() -> Path | None:
    """Return the model that comes with Cloze: in the package of a wheel, in `models/` of a clone; None if missing."""
    package = Path(__file__).parents[1]
    return next((path for path in (package / DEFAULT, package.parent / "models" / DEFAULT) if path.is_dir()), None)


def locate(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a bundle. `cloze-mini` is the default bundle, unless the working directory has a folder of
    that name. Raises BundleError if this installation has no default bundle.
    """
    path = Path(name)
    if str(path) != DEFAULT or path.exists():
        return path
    if bundle := default_bundle():
        return bundle
    raise BundleError(f"{DEFAULT} is not part of this installation; name the folder of a bundle instead")


def unreadable(path: Path, error: OSError) -> BundleError:
    """Make the error for a bundle, or a folder of bundles, that exists but cannot be read."""
    file = error.filename or path
    return BundleError(f"{file} cannot be read ({error.strerror}); give the user of this process read permission")


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_spec(folder: Path) -> Spec:
    path = folder / SPEC_FILE
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a folder; make a bundle with `{EXPORT_COMMAND}`")
    if not path.is_file():
        raise BundleError(
            f"{folder} has no {SPEC_FILE}, so it is not a finished bundle; make one with `{EXPORT_COMMAND}`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {RESTORE}") from error
    content = upgrade(content)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format_version {version!r}, but this version of Cloze reads {FORMAT_VERSION}; "
            f"export again with this version: `{EXPORT_COMMAND}`"
        )
    try:
        return Spec.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}, {key}: {first['msg']}, found {first['input']!r:.200}; {RESTORE}") from error


def _check_files(folder: Path, spec: Spec) -> dict[str, tuple[int, int]]:
    """Check every file's digest. Return the stamp that each file had before it was hashed."""
    stamps = {}
    for name in dict.fromkeys((*REQUIRED_FILES, *spec.files)):
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise BundleError(f"{folder / SPEC_FILE}: file {name!r} is outside the bundle; {RESTORE}")
        if name not in spec.files:
            raise BundleError(f"{folder / SPEC_FILE} does not list {name}; export again: `{EXPORT_COMMAND}`")
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; {RESTORE}")
        stamps[name] = _stamp(path)
        if sha256(path) != spec.files[name]:
            raise BundleError(
                f"{path} is not the file that was exported (sha256 differs); restore it or export again: "
                f"`{EXPORT_COMMAND}`"
            )
    if not any(graph in spec.files for graph in GRAPHS.values()):
        raise BundleError(f"{folder} holds no graph ({', '.join(GRAPHS.values())}); export again: `{EXPORT_COMMAND}`")
    return stamps


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _replaceable(target: Path) -> bool:
    return target.is_dir() and ((target / SPEC_FILE).is_file() or not any(target.iterdir()))
