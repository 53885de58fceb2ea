"""Errors that a user of the training commands can fix.

ClozeError
├── RecipeError     a key, value or file of a recipe
├── CorpusError     a file of sentences
├── EncoderError    a model folder or hub name
├── RunError        a run folder
├── ServerError     a server that is evaluated
└── ExportError     a graph that differs too much from the run's model
"""

from cloze.encoding.errors import ClozeError


class RecipeError(ClozeError):
    """A recipe has an unknown key, a wrong type or an impossible value."""


class CorpusError(ClozeError):
    """A file of sentences cannot be read."""


class EncoderError(ClozeError):
    """A model cannot be loaded as a sentence encoder."""


class RunError(ClozeError):
    """A run folder is missing, unfinished or in the way."""


class ServerError(ClozeError):
    """A server does not embed the texts that are sent to it."""


class ExportError(ClozeError):
    """A graph is not close enough to the model it was made from."""
