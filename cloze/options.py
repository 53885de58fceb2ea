"""The options of a command: a pydantic model whose fields are the flags, with one-line errors.

Training and the service both use it, so that all commands have the same flags, help and errors.
"""

import difflib
import inspect
import json
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from cloze.encoding.errors import OptionError

REQUIRED: Final = "the following arguments are required"  # argparse's message if a positional argument is missing
METAVARS: Final = {"str": "TEXT", "int": "N", "float": "X", "{int,float}": "X", "Path": "PATH", "SecretStr": "TEXT"}


class Options(BaseSettings):
    """A subclass's docstring describes the command, and its fields are the options."""

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
    groups: ClassVar[Mapping[str, Collection[str]]] = {}
    """Section titles in the help, each with the names of its fields. Other fields come first, under `options`."""

    @classmethod
    def parse(cls, arguments: Sequence[str] | None, program: str, unless_given: Mapping[str, Any] = {}) -> Self:
        """Parse `arguments`, or the process's command line if None.

        An option that is not given gets its value from `unless_given`, or else its default.

        Raises OptionError, one line that says what to write and never shows a word that may be a key. Ends the process
        after --help.
        """
        words = sys.argv[1:] if arguments is None else list(arguments)
        if other := next((word for word in words if not _is_utf8(word)), None):
            shown = "a word" if any("key" in word.lower() for word in words) else ascii(other)
            raise OptionError(f"{shown} of the command line is not UTF-8; rename the file that it names")
        titles = {flag(name): title for title, names in cls.groups.items() for name in names}
        try:
            source = CliSettingsSource[Any](
                _described(cls),
                cli_prog_name=program,
                add_argument_method=partial(_add_argument, titles, {}),
                parse_args_method=partial(_parse_arguments, bool(titles)),
            )
            return cls(_cli_settings_source=source(args=words), **unless_given)
        except SettingsError as error:
            raise OptionError(cls._explain_usage(str(error).removeprefix("error parsing CLI: "), words)) from None
        except ValidationError as error:  # the original error contains every value
            raise OptionError("; ".join(map(cls._explain, error.errors()))) from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Ignore the process's environment: a variable named ENCODER is not meant for Cloze."""
        return (init_settings,)

    @classmethod
    def called(cls, name: str) -> str:
        """Return the name of an option in error messages."""
        return flag(name)

    @classmethod
    def _explain_usage(cls, reason: str, arguments: Sequence[str]) -> str:
        problem, _, words = reason.partition(": ")
        if problem == REQUIRED and any(map(cls._takes_several, arguments)):
            return f"{reason}; write it before the options: an option with a list takes every word after it"
        if problem != "unrecognized arguments":
            return reason
        if any("key" in argument.lower() for argument in arguments):  # as in `--api-key KEY` for `--api-keys KEY`
            words = " ".join(word.partition("=")[0] if word.startswith("--") else "***" for word in words.split())
        flags = [flag(field.alias or name) for name, field in cls.model_fields.items()]
        option = re.search(r"--[\w-]+", words)
        close = difflib.get_close_matches(option[0], flags, 1) if option else []
        return f"{problem}: {words}; {f'did you mean {close[0]}?' if close else '--help lists the options'}"

    def given(self) -> set[str]:
        """Return what the command line sets, as `--NAME`, also for arguments that are given without their names."""
        fields = ((name, field) for name, field in type(self).model_fields.items() if name in self.model_fields_set)
        return {flag(field.alias or name) for name, field in fields}

    @classmethod
    def _takes_several(cls, word: str) -> bool:
        fields = (field for name, field in cls.model_fields.items() if flag(field.alias or name) == word)
        return any(get_origin(field.annotation) in (list, tuple) for field in fields)

    @classmethod
    def _explain(cls, detail: ErrorDetails) -> str:
        if not detail["loc"]:
            return detail["msg"].removeprefix("Value error, ")
        name = str(detail["loc"][0])
        meaning = {field.alias or key: field.description or "" for key, field in cls.model_fields.items()}[name]
        if detail["type"] == "missing":
            return f"{cls.called(name)} is missing: {meaning.rstrip('.')}"
        problem = detail["msg"][0].lower() + detail["msg"][1:]
        return f"{cls.called(name)} is {detail['input']!r:.200}: {problem} ({meaning.rstrip('.')})"


class _Switch(BooleanOptionalAction):
    """`--NAME` or `--no-NAME`, even if the name itself begins with "no-"."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        opposite = "--" + str(option_string).removeprefix("--no-")
        setattr(namespace, self.dest, opposite == option_string or opposite not in self.option_strings)


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def flag(name: str) -> str:
    """`batch_size` -> `--batch-size`"""
    return "--" + name.replace("_", "-")


def _described(options: type[Options]) -> type[Options]:
    options.__doc__ = inspect.cleandoc(options.__doc__ or "")  # the help shows it unchanged
    return options


def _add_argument(titles: Mapping[str, str], groups: dict[str, Any], parser: Any, *names: str, **keywords: Any) -> Any:
    """Add an argument with simpler help: a list shows the type of one item, and an empty default is not shown.

    A switch is a `_Switch`. `groups` has the argument groups that were made for `titles`.
    """
    group, title = parser, titles.get(names[-1])
    if title is not None:
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
    if keywords.get("action") is BooleanOptionalAction:
        keywords["action"] = _Switch
    if "metavar" in keywords:
        word = re.sub(r"^(?:list|tuple)\[(.*?)(?:,\.\.\.)?\]$", r"\1", keywords["metavar"])
        keywords["metavar"] = METAVARS.get(word, word)
    if keywords.get("help"):
        keywords["help"] = re.sub(r" ?\(default: (?:None|\(\)|\[\]|)\)", "", keywords["help"])
    return group.add_argument(*names, **keywords)


def _parse_arguments(grouped: bool, parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse the command line. Lists become JSON, because pydantic-settings would split their words at commas.

    If the options are `grouped`, the usage line does not list them: they are many, and the help lists them below.
    """
    if grouped:
        parser.usage = "%(prog)s [--NAME VALUE ...]"
    namespace = parser.parse_args(arguments)
    for name, value in vars(namespace).items():
        if isinstance(value, list):
            setattr(namespace, name, json.dumps(value))
    return namespace


def key_of(file: Path | None) -> str:
    """The API key in a file; empty without a file. Raises OptionError."""
    if file is None:
        return ""
    try:
        words = file.read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--key-file {file} cannot be read ({error}); give a file that holds the API key") from error
    if len(words) != 1 or not (words[0].isascii() and words[0].isprintable()):
        raise OptionError(f"--key-file {file} must contain one API key of ASCII characters, and nothing else")
    return words[0]
