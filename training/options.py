"""What the training commands share: options that only the command line sets, and a check of a file to write."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from encoding.errors import OptionError
from encoding.options import Options, flag
from training.errors import RunError

__all__ = ["Command", "check_new_file"]


class Command(Options):
    """The options of one command; a subclass's docstring describes it."""

    @classmethod
    def read(cls, arguments: Sequence[str], program: str) -> Self:
        """Raises OptionError, one line that says what to write. Ends the process after --help."""
        for word in arguments:
            name, _, _ = word.partition("=")
            if name.startswith("--") and "_" in name:
                raise OptionError(f"{name} is now written {flag(name[2:])}")
        return cls.parse(arguments, program)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave the environment out: a variable named ENCODER is not meant for Cloze."""
        return (init_settings,)


def check_new_file(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`. Raises RunError."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent} is not a folder; make it first, {path.name} is written there at the end")
