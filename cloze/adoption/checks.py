"""The checks of both ways to make a bundle: it must give the same tokens and vectors as the model itself."""

from collections.abc import Callable, Sequence
from typing import Final

from cloze.adoption.modules import AdoptionError
from cloze.encoding.bundle import EmbeddingConfig
from cloze.encoding.template import TEXT, Template
from cloze.encoding.text import TextEncoder

LARGEST_DIFFERENCE: Final = 1e-5  # of a normalised vector


def check_tokens(
    text_encoder: TextEncoder,
    config: EmbeddingConfig,
    texts: Sequence[str],
    tokenize: Callable[[list[str]], list[list[int]]],
    source: str,
) -> None:
    """Compare the ids of `texts` in each template with those of the model's own tokenizer. Raises AdoptionError."""
    for template in dict.fromkeys([config.template, *config.templates.values()]):
        encoder = text_encoder.within(Template.parse(template, config.pooling))
        prompt = template.removesuffix(TEXT)
        compared = [text for text in texts if text or not prompt]  # without text, a prompt's last blank may be a token
        expected = tokenize([f"{prompt}{text}" for text in compared])
        for text, ids, tokens in zip(compared, expected, encoder.encode(compared), strict=True):
            if ids != tokens.ids:
                raise AdoptionError(
                    f"{source!r} encodes {text[:40]!r} as the tokens {ids[:8]}, but a bundle would encode it as "
                    f"{tokens.ids[:8]} (template {template!r}); Cloze supports only tokenizers whose sequences are "
                    "[CLS], text, [SEP]: choose another model"
                )


def check_vectors(difference: float, rearranged: float, own: str, source: str) -> None:
    """Check the largest differences from the vectors of the model itself, `own`. Raises AdoptionError.

    `difference` compares texts that both ran alone, or both ran in one batch. `rearranged` compares the same texts if
    only one of the two ran them alone.
    """
    if difference <= LARGEST_DIFFERENCE < rearranged:
        raise AdoptionError(
            f"{source!r}: the vector of a text changes by {rearranged:.1e} in a batch with longer texts, because its "
            "layers do not mask the padding. The service batches the texts of several requests, so Cloze cannot serve "
            "this model"
        )
    if not difference <= LARGEST_DIFFERENCE:
        raise AdoptionError(
            f"{source!r}: the bundle's vectors differ from those of {own} by {difference:.1e}; the limit is "
            f"{LARGEST_DIFFERENCE:.0e}, so Cloze cannot serve this model"
        )
