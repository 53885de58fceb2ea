"""A continuous template (OptiPrompt, arXiv:2104.05240; PromptBERT section 4.2): trained vectors for its words.

They are inserted by position, so a text that contains the template's words keeps its own embeddings.
"""

from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cloze.encoding.errors import TemplateError
from cloze.encoding.text import TextEncoder

CONTINUOUS_FILE = "template.safetensors"


class ContinuousTemplate(nn.Module):
    """One vector, instead of the word embedding, for each token of a template except [CLS], [MASK] and [SEP]."""

    places: Tensor

    def __init__(self, text_encoder: TextEncoder, embeddings: nn.Module) -> None:
        """Initialise with the embeddings of the manual template's words, so that nothing changes at first.

        `embeddings` maps token ids to the encoder's static word embeddings. Raises TemplateError for a template
        without words.
        """
        super().__init__()
        prefix, suffix = text_encoder.prefix_ids, text_encoder.suffix_ids
        tokens = list(zip(prefix + suffix, [*range(len(prefix)), *range(-len(suffix), 0)], strict=True))[1:-1]
        tokens = [(token, place) for token, place in tokens if token != text_encoder.special.mask]
        if not tokens:
            raise TemplateError(
                f"template {str(text_encoder.template)!r} has no words to make continuous; write some around [X]"
            )
        ids, places = map(torch.tensor, zip(*tokens, strict=True))
        self.template = text_encoder.template
        # columns: before the text they count from the start, after the text from the end of the attended tokens
        self.register_buffer("places", places, persistent=False)  # (k)
        self.vectors = nn.Parameter(embeddings(ids).detach().clone())  # (k, d)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Word embeddings (n, L, d) of sequences of `lengths` (n) tokens -> the same with the template's vectors."""
        columns = torch.where(self.places < 0, lengths.unsqueeze(1) + self.places, self.places)  # (n, k)
        columns = columns.unsqueeze(2).expand(-1, -1, words.shape[2])
        return words.scatter(1, columns, self.vectors.to(words.dtype).expand(words.shape[0], -1, -1))

    def save(self, folder: Path) -> None:
        """Write CONTINUOUS_FILE, which also holds the template that the vectors replace."""
        vectors = self.vectors.detach().contiguous()
        save_file({"vectors": vectors}, folder / CONTINUOUS_FILE, metadata={"template": str(self.template)})

    @classmethod
    def load(cls, folder: Path, text_encoder: TextEncoder, embeddings: nn.Module) -> Self | None:
        """Read the file that `save` wrote; None if there is none.

        Raises TemplateError if it was written for another template, and OSError, RuntimeError or SafetensorError if it
        does not hold such vectors.
        """
        path = folder / CONTINUOUS_FILE
        if not path.is_file():
            return None
        template = str(text_encoder.template)
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("template")
            if written != template:
                raise TemplateError(
                    f"{folder} has trained vectors for the words of {written!r}, not of {template!r}; give "
                    "the template that they were trained for"
                )
            continuous = cls(text_encoder, embeddings)
            continuous.load_state_dict({"vectors": file.get_tensor("vectors")})
        return continuous
