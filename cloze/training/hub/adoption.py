"""Load an encoder as it is served by itself, and any sentence-transformers model as an encoder.

Pooling, Dense and LayerNorm become part of the encoder. Prompts become named templates.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cloze.adoption.checks import check_tokens, check_vectors
from cloze.adoption.hub import model_folder
from cloze.adoption.modules import check_behind, check_pooling, modules_of, templates_of
from cloze.encoding.bundle import Bundle, EmbeddingConfig
from cloze.training.bar import bar
from cloze.training.encoder_source import encoder_folder, kind_of, own_config, saved_config
from cloze.training.errors import EncoderError
from cloze.training.model.encoder import SentenceEncoder, check_tokenizer, loading, positions
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.heads import AdoptedHead
from cloze.training.model.pretrained import fastest_device, quiet

CHECKED: Final = ("", "A man is playing the guitar.", "[MASK] and naïve 日本語")  # compared if a model is only read


def load_as_served(source: str) -> "SentenceEncoder | GraphEncoder | None":
    """An encoder as it is served by itself; None if it has no embedding configuration.

    That is a bundle's most exact graph, a run, or a model that sentence-transformers saved. Raises ClozeError.
    """
    if kind_of(source) == "bundle":
        bundle = Bundle.load(encoder_folder(source))
        return GraphEncoder.of(bundle, bundle.precisions[0])
    if own_config(source) is None:
        return None
    saved = saved_config(Path(encoder_folder(source))) is not None
    encoder = SentenceEncoder.load(source) if saved else load_sentence_transformer(source, CHECKED)
    return encoder.to(fastest_device())


def refuse_layers_behind(source: str) -> None:
    """Raises EncoderError for a sentence-transformers model with layers after its pooling, which a run cannot hold."""
    behind = [module.kind for module in modules_of(model_folder(source), source)[2:] if module.kind != "Normalize"]
    if behind:
        raise EncoderError(
            f"{source} has layers after its pooling, which a run cannot include ({', '.join(behind)}); make a bundle "
            "with `cloze adopt`, which includes them"
        )


def load_sentence_transformer(
    source: str, texts: Sequence[str], max_tokens: int | None = None, folder: Path | None = None
) -> SentenceEncoder:
    """Load a sentence-transformers model, a folder or a hub name, and compare the vectors of `texts` with its own.

    sentence-transformers loads the model itself, so folders of its earlier versions can be read too. Errors name what
    Cloze cannot represent: other modules, several poolings concatenated, prompts that are excluded from the pooling,
    and a tokenizer whose sequences are not [CLS], text, [SEP]. They also name what the library would silently replace:
    a pooling that is not configured, an activation function of the model's own code, a missing tokenizer.

    The model's prompts become named templates, and its default prompt the template. `max_tokens` replaces its limit.
    `folder` has its files if they were fetched before. Raises ClozeError.
    """
    folder = folder or model_folder(source)
    modules_of(folder, source)
    with loading(source, "a sentence-transformers model"):
        library = import_module("sentence_transformers")
        model = library.SentenceTransformer(
            str(folder),
            device="cpu",
            model_kwargs={"dtype": torch.float32},
            trust_remote_code=False,
            local_files_only=True,
        )
    transformer, pooling, *following = _modules(model, source)
    _name_last_token(transformer.tokenizer)
    check_tokenizer(transformer.tokenizer, source)
    transformer.model.config.use_cache = False  # for decoders: a graph has no cache
    template, templates = templates_of(model.prompts, model.default_prompt_name, source)
    config = EmbeddingConfig(
        template=template,
        templates=templates,
        pooling=pooling.pooling_mode,
        max_tokens=_limit(transformer, source, max_tokens),
        final_period=False,
        denoising=False,
    )
    encoder = SentenceEncoder(transformer.model, transformer.tokenizer, config).eval()
    if following:
        encoder.head = AdoptedHead(following, model.get_embedding_dimension())
    transformer.max_seq_length = config.max_tokens

    def tokenize(prompted: list[str]) -> list[list[int]]:
        special = {"split_special_tokens": True}  # "[MASK]" in a text is text
        found = encoder.tokenizer(prompted, truncation=True, max_length=config.max_tokens, **special)
        return found["input_ids"]  # type: ignore[no-any-return]

    check_tokens(encoder.text_encoder, config, texts, tokenize, source)
    _compare_vectors(encoder, model, texts, source)
    return encoder


def _modules(model: Any, source: str) -> list[Any]:
    """Transformer, pooling and the modules after it, without a final Normalize: a bundle's graph does not normalise."""
    modules = list(model)
    mode = modules[1].pooling_mode
    check_pooling([mode] if isinstance(mode, str) else mode, modules[1].include_prompt, source)
    inputs = [getattr(module, "module_input_name", "sentence_embedding") for module in modules[2:]]
    check_behind(inputs, model.truncate_dim, source)
    return modules[:-1] if type(modules[-1]).__name__ == "Normalize" else modules


def _name_last_token(tokenizer: Any) -> None:
    """Make the last token the separator if a decoder's tokenizer adds only one token, after the text."""
    ids = tokenizer("")["input_ids"]
    if tokenizer.cls_token_id is None and tokenizer.sep_token_id is None and len(ids) == 1:
        tokenizer.sep_token = tokenizer.convert_ids_to_tokens(ids[0])


def _limit(transformer: Any, source: str, max_tokens: int | None) -> int:
    """The longest sequence in tokens: `max_tokens`, or else the model's own limit."""
    largest = positions(transformer.model, source)
    if max_tokens is not None and max_tokens > largest:
        raise EncoderError(f"max_tokens is {max_tokens}; {source!r} has positions for {largest}: lower it")
    return max_tokens or min(int(transformer.max_seq_length), largest)


def _compare_vectors(encoder: SentenceEncoder, model: Any, texts: Sequence[str], source: str) -> None:
    """Compare the normalised vectors of `texts` with those of sentence-transformers. Raises AdoptionError."""
    model[0].processing_kwargs = {"text": {"split_special_tokens": True}}
    with quiet():
        expected = model.encode(list(texts), show_progress_bar=False, normalize_embeddings=True)
    batched = encoder.embed(texts)
    alone = np.concatenate([encoder.embed([text]) for text in bar(texts, desc="comparing", unit=" texts")])
    batched, alone = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (batched, alone))
    difference, alone_difference = (float(np.abs(vectors - expected).max()) for vectors in (batched, alone))
    check_vectors(difference, alone_difference, "sentence-transformers", source)
