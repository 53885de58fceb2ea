"""A run folder: everything that one training run writes.

recipe.toml        the resolved recipe
data.json          the files of text: names, counts, digests
encoder_data.json  the same for the run or the bundle that the encoder comes from
inputs.json        digests of everything else that is read: models, dev data and others
log.jsonl          one line per logged step: loss, its parts, rate, dev scores
tensorboard/       the same for TensorBoard, if `report_to` has it
prepared/          the teacher's vectors of the texts, until training is finished
checkpoint-N/      weights, optimiser, schedule and random states after step N
model/             the chosen encoder, written when training is finished
run.json           provenance: parent, recipe, data, commit, seeds, versions, scores
"""

import json
import os
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from safetensors import SafetensorError

from cloze.command import is_full
from cloze.encoding.bundle import SPEC_FILE, Bundle, Source
from cloze.encoding.files import check_folder, write_whole
from cloze.machine import versions
from cloze.training.data.corpus import Corpus
from cloze.training.encoder_source import (
    FOLDER_DIGEST,
    MODEL,
    PROVENANCE_FILE,
    RECIPE_FILE,
    encoder_folder,
    provenance_in,
)
from cloze.training.errors import RunError
from cloze.training.recipes.recipe import Recipe, to_toml

# torch.save's messages when it cannot write, which omit the cause; torch 2.13 uses the first two
TORCH_WRITING: Final = ("unexpected pos", "iostream error", "PytorchStreamWriter failed writing")

ADAPTED: Final = "adapt"  # the method of a run of `cloze adapt`
UNTRAINED: Final = "untrained"  # the method of an encoder that became a run without training


@dataclass(frozen=True)
class Run:
    """The paths of one run folder, and the operations on them."""

    path: Path

    @classmethod
    def fresh(cls, path: Path) -> Self:
        """A run folder that does not exist yet. Raises RunError if something is in its place."""
        run = cls(path)
        if run.recipe_file.is_file():
            raise RunError(f"{path} is a run; continue it with --resume {path}, or choose another --out")
        if path.is_symlink() and not path.exists():
            raise RunError(f"{path} is a link to {path.readlink()}, which does not exist; choose another --out")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} is not an empty folder; choose another --out")
        return run

    @classmethod
    def same(cls, path: Path, recipe: Recipe) -> Self:
        """A run folder that does not exist yet, or a run with the same recipe. Raises RunError."""
        run = cls(path)
        if not run.recipe_file.is_file():
            return cls.fresh(path)
        before, now = tomllib.loads(run.recipe_file.read_text(encoding="utf-8")), tomllib.loads(to_toml(recipe))
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed:
            raise RunError(f"{path} was trained with another {', '.join(changed)}; choose another --out")
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run folder. Raises RunError if there is none."""
        run = cls(path)
        if any(path.glob("seed-*/recipe.toml")):
            raise RunError(f"{path} holds one run per seed; continue them with the command that started them")
        if not run.recipe_file.is_file():
            if run.provenance_file.is_file():
                raise RunError(
                    f"{path} is finished: cloze average or cloze adapt made it from other runs; nothing to resume"
                )
            raise RunError(f"{path} is not a run folder (no recipe.toml); start one: cloze fit RECIPE --out {path}")
        return run

    @property
    def recipe_file(self) -> Path:
        return self.path / RECIPE_FILE

    @property
    def data_file(self) -> Path:
        return self.path / "data.json"

    @property
    def encoder_data_file(self) -> Path:
        return self.path / "encoder_data.json"

    @property
    def encoder_digest(self) -> str:
        """The digest of the encoder that the run began with; "" if it is not recorded, as for a mean of runs."""
        return next((digest for name, digest in self._inputs.items() if name.startswith("encoder ")), "")

    @property
    def inputs_file(self) -> Path:
        return self.path / "inputs.json"

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def best(self) -> Path:
        """The weights of the best evaluation so far, including those used in training only."""
        return self.path / "best.safetensors"

    @property
    def prepared(self) -> Path:
        """What a method computes from the texts before the first step; removed at the end."""
        return self.path / "prepared"

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def export_command(self) -> str:
        """The command to run next, once the run is finished."""
        return f"cloze export {shlex.quote(str(self.path))} models/NAME"

    @property
    def provenance_file(self) -> Path:
        return self.path / PROVENANCE_FILE

    @property
    def finished(self) -> bool:
        return self.provenance_file.is_file()

    def provenance(self) -> dict[str, Any]:
        """What `finish` wrote."""
        return provenance_in(self.path)

    def warning(self) -> str | None:
        """A warning if the finished run scores below the encoder that it began with; else None."""
        provenance = self.provenance()
        if not provenance.get("below_parent"):
            return None
        return (
            f"warning: {self.path} scores lower than {provenance['recipe']['encoder']} with its own template and "
            f"pooling: {provenance['chosen_by']} {provenance['dev_score']:.2f}, not {provenance['parent_score']:.2f}; "
            "serve the encoder itself, or train differently (docs/training.md)"
        )

    @contextmanager
    def space_for(self, size: int) -> Iterator[None]:
        """Require space for a folder of `size` bytes within the context; existing files in it count.

        Raises RunError before training if the disk has less, and later if writing fails because the disk is full.
        """
        self._check_space(size)
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            if _may_be_full(error):
                self._check_space(size)
            raise

    def _check_space(self, size: int) -> None:
        existing = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.is_dir())
        room = shutil.disk_usage(existing).free + self._used()
        if room < size:
            advice = (
                f" and continue with --resume {self.path}"
                if self.recipe_file.is_file()
                else ", or choose another --out"
            )
            raise RunError(
                f"{self.path} will take up to {size / 1e9:.2f} GB, but its disk has only {room / 1e9:.2f} GB for it; "
                f"free space{advice}"
            )

    def _used(self) -> int:
        """Bytes in the folder. A file that another process of torchrun removes meanwhile counts as 0."""
        used = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):
                    used += os.stat(os.path.join(folder, name)).st_size
        return used

    def make(self) -> None:
        """Make the folder, unless it exists. Raises OptionError if nothing can be written to it."""
        check_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)

    def start(self, recipe: Recipe, corpus: Corpus, inputs: Mapping[str, str]) -> None:
        """Make the folder, and write the recipe and the lists of text files unless it has them.

        The encoder's own training data is read now: its run or bundle may be replaced before this run is finished.
        Raises RunError, BundleError.
        """
        if self.data_file.is_file():
            return
        encoder_data = _trained_on(recipe.encoder)
        self.make()
        write_whole(self.recipe_file, to_toml(recipe))
        _write_json(self.encoder_data_file, encoder_data)
        _write_json(self.inputs_file, inputs)
        _write_json(self.data_file, _sources(corpus))

    def check_inputs(self, corpus: Corpus, inputs: Mapping[str, str]) -> None:
        """Raises RunError if the text, a model or a file has changed since `start`.

        A resumed run would then be neither the old run nor a new one.

        Every process compares its own files, which may be on the disk of its node.
        """
        if changed := _different_texts(_read_json(self.data_file), _sources(corpus)):
            raise RunError(
                f"the text has changed since {self.path} began ({', '.join(changed)}); restore it, or train anew"
            )
        if changed := _different_inputs(self._inputs or inputs, inputs):
            raise RunError(f"{', '.join(changed)} has changed since {self.path} began; restore it, or train anew")

    def differences(self, other: Self) -> list[str]:
        """Names of the texts, models and files that differ between the two runs."""
        texts = _different_texts(_read_json(self.data_file), _read_json(other.data_file))
        known = self._inputs and other._inputs
        return texts + (_different_inputs(self._inputs, other._inputs) if known else [])

    @property
    def _inputs(self) -> dict[str, str]:
        """The digests of models and files; none for a mean of runs, and for a run that version 0.2 began."""
        return dict(_read_json(self.inputs_file)) if self.inputs_file.is_file() else {}

    def rewind(self, processes: int = 1) -> Path | None:
        """Remove what a killed process left incomplete; return the newest complete checkpoint, or None to start again.

        A checkpoint is complete if its trainer_state.json, which is written last, is complete. Raises RunError if
        another number of processes saved it: each process continues from its own random state.
        """
        newest, step = None, -1
        for folder in sorted(self.path.glob("checkpoint-*"), key=_step, reverse=True):
            if newest is None and _is_json(folder / "trainer_state.json"):
                newest, step = folder, _step(folder)
            elif newest is None:
                shutil.rmtree(folder)
        if self.log_file.is_file():
            lines = [line for line in self.log_file.read_text(encoding="utf-8").splitlines() if _is_logged(line, step)]
            write_whole(self.log_file, "".join(line + "\n" for line in lines))
        if newest is None:
            self.best.unlink(missing_ok=True)
        saved = len(list(newest.glob("rng_state*.pth"))) if newest else processes
        if saved != processes:
            raise RunError(
                f"{newest} was saved by {saved} processes, but {processes} would continue it; start {saved} with "
                "torchrun: --nnodes, a number and not a range, times --nproc-per-node"
            )
        return newest

    def logged(self) -> list[dict[str, Any]]:
        """The entries of the log."""
        return [json.loads(line) for line in self.log_file.read_text(encoding="utf-8").splitlines()]

    def log(self, entry: dict[str, Any]) -> None:
        """Append one line to the log."""
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self, save: Callable[[Path], None], recipe: Recipe, corpus: Corpus, figures: dict[str, Any]) -> None:
        """Let `save` write the model folder, then write the provenance: a run with run.json is finished."""
        shutil.rmtree(self.model, ignore_errors=True)
        save(self.model)
        shutil.rmtree(self.prepared, ignore_errors=True)
        provenance = {
            "parent": parent_name(recipe.encoder),
            "recipe": recipe.model_dump(mode="json", exclude_none=True),
            "data": self._all_data(corpus),
            "commit": _commit(),
            "seeds": [recipe.seed],
            "rows": len(corpus),
            "held_out": len(corpus.held_out),
            "versions": versions(("torch", "transformers", "tokenizers", "accelerate")),
            **figures,
        }
        self.write_provenance(provenance)

    def _all_data(self, corpus: Corpus) -> list[dict[str, Any]]:
        """The text files of the encoder and of this run, each once."""
        has_encoder_data = self.encoder_data_file.is_file()  # a run that version 0.2 began has none
        encoder_data = _read_json(self.encoder_data_file) if has_encoder_data else []
        return _distinct([*encoder_data, *_sources(corpus)])

    def write_provenance(self, provenance: dict[str, Any]) -> None:
        """Write the last file of a run, which marks it as finished."""
        _write_json(self.provenance_file, provenance)


def _different_texts(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the files that only one of the two lists has; if there are none, a note that the order differs."""
    apart = [source["name"] for source in (*now, *before) if source not in before or source not in now]
    return list(dict.fromkeys(apart)) or ([] if before == now else ["their order"])


def _different_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = {name for name in before.keys() & now.keys() if differ(before[name], now[name])}
    return sorted(changed | (before.keys() ^ now.keys()))


def differ(first: str, second: str) -> bool:
    """Whether two digests are of different inputs. That of a folder is not compared with one of an earlier format."""
    return first != second and first.startswith(FOLDER_DIGEST) == second.startswith(FOLDER_DIGEST)


def parent_name(encoder: str) -> str:
    """An encoder's name in a provenance: a hub name unchanged, a folder or a run without its path."""
    path = Path(encoder).absolute()
    if not path.is_dir():
        return encoder
    run = _run_of(path)
    return run.path.name if run else path.name


def provenance_of_encoder(encoder: str) -> dict[str, Any]:
    """The provenance of an encoder or a bundle that is written as a run without being trained.

    Raises RunError, BundleError.
    """
    recipe = {"method": UNTRAINED, "encoder": encoder}
    return {
        "parent": parent_name(encoder),
        "recipe": recipe,
        "data": _trained_on(encoder),
        "commit": _commit(),
        "seeds": [],
        "rows": 0,
        "versions": versions(("torch", "transformers", "tokenizers", "accelerate")),
    }


def with_sources(provenance: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """The provenance with the files of one more corpus."""
    return provenance | {"data": _distinct([*provenance["data"], *_sources(corpus)])}


def _run_of(encoder: Path) -> Run | None:
    """The run whose model folder this is; None if there is none."""
    run = Run(encoder.parent)
    return run if encoder == run.model and (run.finished or run.recipe_file.is_file()) else None


def _trained_on(encoder: str) -> list[dict[str, Any]]:
    """The text files of the run or the bundle from which an encoder comes; none for other encoders.

    Raises RunError, BundleError.
    """
    path = Path(encoder_folder(encoder)).absolute()
    if (path / SPEC_FILE).is_file():
        return [source.model_dump(mode="json") for source in Bundle.load(path).spec.provenance.data]
    run = _run_of(path)
    if run is None or not run.finished:
        return []
    try:
        return [Source.model_validate(source).model_dump(mode="json") for source in run.provenance()["data"]]
    except ValueError as error:
        raise RunError(
            f"{run.provenance_file} does not say which text its model was trained on; train again"
        ) from error


def _may_be_full(error: OSError | RuntimeError | SafetensorError) -> bool:
    """Whether a full disk can raise this error. Others, such as a GPU's out of memory, are not about the disk."""
    torch_wrote = isinstance(error, RuntimeError) and any(words in str(error) for words in TORCH_WRITING)
    return torch_wrote or is_full(error)


def _sources(corpus: Corpus) -> list[dict[str, Any]]:
    return [source.model_dump(mode="json") for source in corpus.sources]


def _distinct(sources: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({source["sha256"]: source for source in sources}.values())


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, content: object) -> None:
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _is_logged(line: str, step: int) -> bool:
    """Whether a line of the log was written at or before `step`; the last line may be incomplete."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError):
        return False


def _commit() -> str | None:
    """The commit of Cloze's own working tree; None if Cloze is installed, even inside another project's tree."""
    root = Path(__file__).resolve().parents[2]
    try:
        result = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    top, commit = result.stdout.splitlines()
    return commit if Path(top) == root else None
