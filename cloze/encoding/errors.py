"""The errors that training and the service share.

ClozeError                    anything that a user can fix
├── TemplateError             a template that cannot be used
├── TextError                 a text that cannot be encoded
│   └── TextTooLong           longer than the limit, and truncation was refused
├── BundleError               a bundle that cannot be loaded or written
├── BridgeError               a bridge that cannot be used (encoding/bridge.py)
├── RowsError                 a file whose rows cannot be read (encoding/rows.py)
└── OptionError               an option or a setting that cannot be used

`training` and `service` derive their own errors from ClozeError. Every message says what was found, what is
allowed and what to do next; a command prints it without a traceback.
"""


class ClozeError(Exception):
    """Something that a user can fix."""


class TemplateError(ClozeError):
    """The template cannot be used."""


class TextError(ClozeError):
    """The text cannot be encoded.

    `position` is the index of the text in its request, if it is known. `subject` names the text at the beginning
    of the message; a caller that knows a better name, such as the field of a JSON body, may replace it.
    """

    def __init__(self, problem: str, *, position: int | None = None) -> None:
        super().__init__(problem)
        self.position: int | None = None
        self.subject = ""
        if position is not None:
            self.at(position)

    def at(self, position: int) -> None:
        """Set the position to that of the text in its request."""
        self.position, self.subject = position, f"text {position}"

    def __str__(self) -> str:
        return self.subject + super().__str__()


class TextTooLong(TextError):
    """The text is longer than the limit, and truncation was refused."""


class BundleError(ClozeError):
    """The bundle cannot be loaded or written."""


class OptionError(ClozeError):
    """An option or a setting is not known, or its value cannot be used."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
