"""The command `cloze`, and what the commands of training and the service share: exit codes and one-line errors.

Exit codes: 0 done, 1 a difference (`verify`) or missing rows (`bulk --check`), 2 an error that the user can fix (a
ClozeError or a full disk), 3 done except for some rows (`bulk`), 130 interrupted. Any other exception is a bug and
keeps its traceback. Commands are named by strings, so that neither training nor the service is imported before it is
needed.
"""

import errno
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Final

from cloze.encoding.errors import ClozeError

COMMANDS: Final = {  # command -> its module in `cloze`, and what it does
    "serve": ("service", "serve bundles over HTTP"),
    "doctor": ("service.doctor", "show the hardware and software of this machine, and whether it is ready to serve"),
    "bulk": ("service.bulk", "embed the texts in files"),
    "adapt": ("training.adapt", "fine-tune an encoder on your own documents and queries"),
    "fit": ("training.fit", "train a sentence encoder with a recipe"),
    "pretrain": ("training.pretrain", "masked language modelling, continued or from scratch"),
    "evaluate": ("training.evaluate", "score a run, a bundle, an encoder or a server"),
    "compare": ("training.compare", "show which differences between models are significant"),
    "calibrate": ("training.evaluation.calibrate", "map cosines to scores or probabilities, from judged pairs"),
    "head": ("training.evaluation.head", "train a classifier on labelled texts"),
    "verify": ("training.evaluation.verify", "compare a server's vectors with those of a model"),
    "texts": ("training.texts", "make training texts for search and similarity"),
    "bridge": ("training.bridge", "search an old index with a new model"),
    "mine": ("training.mine", "find hard negatives for pairs"),
    "export": ("training.export", "make a bundle from a finished run"),
    "adopt": ("training.adopt", "make a bundle from a sentence-transformers model"),
    "convert": ("training.convert", "make a bundle that sentence-transformers can load too"),
    "distil-static": ("training.distil_static", "make a much faster bundle whose vectors are means of token vectors"),
    "templates": ("training.templates", "find the best template for an encoder"),
    "explain": ("training.explain", "show the words that an encoder predicts at [MASK]"),
    "weigh": ("training.weigh", "lower the weight of frequent words in mean pooling, without training"),
    "average": ("training.average", "average the weights of several runs"),
}
WITHOUT_TORCH: Final = {"adopt": "adoption"}  # command -> the module to run if torch is not installed
GUIDE: Final = """\
Cloze turns your own text into a sentence-embedding service.

  your text --> adapt or fit --> run --> export --> bundle --> serve --> vectors over HTTP
                                  |                    |
                                  +----- evaluate -----+

  cloze serve                              serve the model that comes with Cloze on 127.0.0.1:8080
  cloze adapt --documents docs --out run   fine-tune it on your own text, and see whether that helps
  cloze fit                                list the recipes for training any other encoder
  cloze export run model                   make a bundle from a run: a self-contained folder
  cloze evaluate model --pairs pairs.csv   score a bundle, a run or a server

All commands: cloze --help. Options of one: cloze COMMAND --help. To check this machine: cloze doctor."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's quota is used up
EXTRAS: Final = {  # module or package -> the extras that it needs
    "adoption": "cpu,adopt",
    "service": "cpu",
    "service.bulk": "cpu,bulk",
    "training": "train",
}
REPORTS: Final = ("matplotlib", "tensorboard")  # packages of the extra `report`


def run(command: Callable[[], int | None]) -> int:
    """Call a command and return its exit code; a ClozeError or a full disk becomes one line on stderr."""
    try:
        return command() or 0
    except ClozeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not is_full(error):
            raise
        print(f"error: {error}; free space on that disk, and start the command again", file=sys.stderr)
        return 2


def is_full(error: Exception) -> bool:
    """Whether a full disk caused the error: an OSError, or the error of a Rust library such as safetensors."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)


def main() -> int:
    """Run the command that the first argument names, with the remaining arguments."""
    return run(_dispatch)


def _dispatch() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_usage() if words else GUIDE)
        return 0
    name, *arguments = words
    if name not in COMMANDS:
        raise ClozeError(f"cloze has no command {name!r}; it has {', '.join(COMMANDS)}")
    module, _ = COMMANDS[name]
    if name in WITHOUT_TORCH and find_spec("torch") is None:
        module = WITHOUT_TORCH[name]
    side = f"cloze.{module.partition('.')[0]}"
    if find_spec(side) is None:  # a container image contains training or the service
        raise ClozeError(f"cloze {name} is not in this installation; use the image or the package that has {side}")
    sys.argv = [f"cloze {name}", *arguments]
    try:
        runpy.run_module(f"cloze.{module}", run_name="__main__")
    except ModuleNotFoundError as error:
        if advice := _advice(module, error):
            raise ClozeError(advice) from error
        raise
    return 0


def end_in_one_line(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of `python -m training.NAME`: print one line and exit with 2 if a package is not installed.

    `run` cannot do it, because a command's module imports some packages before it calls `run`.
    """
    spec = sys.modules["__main__"].__spec__  # None until Python has located the module
    module = spec.name.removeprefix("cloze.").removesuffix(".__main__") if spec else "training"
    advice = _advice(module, error) if isinstance(error, ModuleNotFoundError) else None
    if advice is None:
        sys.__excepthook__(error_type, error, trace)
    else:
        print(f"error: {advice}", file=sys.stderr)
        sys.exit(2)


def _advice(module: str, error: ModuleNotFoundError) -> str | None:
    """What to install for a command's module; None if no extra has the missing module, which is a bug."""
    extra = EXTRAS.get(module, EXTRAS.get(module.partition(".")[0]))
    missing = (error.name or "").partition(".")[0]
    if extra is None or missing in ("", "cloze"):
        return None
    if missing in REPORTS:
        extra = "report"
    started = (f"cloze {name}" for name, (named, _) in COMMANDS.items() if module in (named, WITHOUT_TORCH.get(name)))
    command = next(started, module)
    return f"{command} needs {missing}, which is not installed: pip install '.[{extra}]' in a clone of Cloze"


def _usage() -> str:
    lines = [f"  {name:13} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(["usage: cloze COMMAND ...", "", *lines, "", "Options of a command: cloze COMMAND --help"])
