"""The errors both sides share.

ClozeError                    anything a user can put right
├── TemplateError             a template that cannot be used
├── TextError                 a text that cannot be encoded
│   └── TextTooLong           longer than the limit, and truncation was refused
└── BundleError               a bundle that cannot be loaded or written

`training` and `service` hang their own errors on ClozeError. Every message says what was found, what is
allowed and what to do next; a command prints it without a traceback.
"""

__all__ = ["BundleError", "ClozeError", "TemplateError", "TextError", "TextTooLong"]


class ClozeError(Exception):
    """Something a user can put right."""


class TemplateError(ClozeError):
    """The template cannot be used."""


class TextError(ClozeError):
    """The text cannot be encoded; `position` is its place among those given, where that is known."""

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class TextTooLong(TextError):
    """The text is longer than the limit, and truncation was refused."""


class BundleError(ClozeError):
    """The bundle cannot be loaded or written."""
