"""The options of a training command: a pydantic model whose fields are the flags, and errors of one line."""

import difflib
import inspect
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from training.errors import OptionError, RunError

__all__ = ["Command", "check_new_file", "flag"]

METAVARS: Final = {"str": "TEXT", "int": "N", "float": "X", "{int,float}": "X", "Path": "PATH"}


class Command(BaseSettings):
    """A subclass's docstring describes the command, and its fields are the options. Only the command line is read."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )

    @classmethod
    def read(cls, arguments: Sequence[str], program: str) -> Self:
        """Raises OptionError, one line that says what to write. Ends the process after --help."""
        for word in arguments:
            name, _, _ = word.partition("=")
            if name.startswith("--") and "_" in name:
                raise OptionError(f"{name} is now written {flag(name[2:])}")
        try:
            source = CliSettingsSource[Any](
                _described(cls),
                cli_prog_name=program,
                add_argument_method=_add_argument,
                parse_args_method=_parse_arguments,
            )
            return cls(_cli_settings_source=source(args=list(arguments)))
        except SettingsError as error:
            raise OptionError(cls._explain_usage(str(error).removeprefix("error parsing CLI: "))) from error
        except ValidationError as error:
            raise OptionError(cls._explain(error.errors()[0])) from error

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave the environment out: a variable named ENCODER is not meant for Cloze."""
        return (init_settings,)

    @classmethod
    def _explain_usage(cls, reason: str) -> str:
        unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)", reason)
        if unknown is None:
            return reason
        known = [flag(field.alias or name) for name, field in cls.model_fields.items()]
        close = difflib.get_close_matches(unknown[1], known, 1)
        return f"{reason}; did you mean {close[0]}?" if close else f"{reason}; --help lists the options"

    @classmethod
    def _explain(cls, detail: ErrorDetails) -> str:
        if not detail["loc"]:
            return detail["msg"].removeprefix("Value error, ")
        name = str(detail["loc"][0])
        fields = {field.alias or key: field for key, field in cls.model_fields.items()}
        if detail["type"] == "missing":
            return f"{flag(name)} is missing; it is the {fields[name].description}"
        problem = detail["msg"][0].lower() + detail["msg"][1:]
        return f"{flag(name)} is {detail['input']!r:.200}: {problem} ({fields[name].description})"


def flag(name: str) -> str:
    """`batch_size` -> `--batch-size`"""
    return "--" + name.replace("_", "-")


def check_new_file(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`. Raises RunError."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; name a file to write in it")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent} is not a folder; make it first, {path.name} is written there at the end")


def _described(command: type[Command]) -> type[Command]:
    command.__doc__ = inspect.cleandoc(command.__doc__ or "")  # the help shows it as it is
    return command


def _add_argument(group: Any, *names: str, **keywords: Any) -> Any:
    """Simpler help: the kind of one word, and no default for an option that is unset."""
    if "metavar" in keywords:
        word = re.sub(r"^(?:list|tuple)\[(.*?)(?:,\.\.\.)?\]$", r"\1", keywords["metavar"])
        keywords["metavar"] = METAVARS.get(word, word)
    if keywords.get("help"):
        keywords["help"] = re.sub(r" ?\(default: (?:None|\(\)|\[\])\)$", "", keywords["help"])
    return ArgumentParser.add_argument(group, *names, **keywords)


def _parse_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Lists as JSON: pydantic-settings would split their words at commas."""
    found = parser.parse_args(arguments)
    for name, value in vars(found).items():
        if isinstance(value, list):
            setattr(found, name, json.dumps(value))
    return found
