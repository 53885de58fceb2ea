"""The subjects that a command names: a run, a bundle, an encoder, or a server."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cloze.encoding.bundle import GRAPHS, SEARCH_NAMES, Bundle
from cloze.options import flag, key_of
from cloze.training.encoder_source import encoder_folder, kind_of, of_library, saved_config
from cloze.training.errors import RunError
from cloze.training.evaluation.options import ModelOptions, ScoringOptions
from cloze.training.evaluation.server import ServerEncoder
from cloze.training.evaluation.task import Subject
from cloze.training.hub.adoption import CHECKED, load_sentence_transformer
from cloze.training.model.encoder import SentenceEncoder, weights_digest
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.masked_words import MaskedWords
from cloze.training.model.pretrained import fastest_device

CONFIG_OPTIONS = ("template", "pooling", "max_tokens", "final_period", "denoise")
SEARCH_TEMPLATES = ("query_template", "document_template")


def subjects(path: str, options: ModelOptions) -> Iterator[Subject]:
    """The subjects: each precision of a bundle, a server, or one model in torch. Raises ClozeError.

    Each is loaded when the iterator reaches it.
    """
    if is_server(path):
        yield _server(path, options)
    elif kind_of(path) == "bundle":
        yield from _graphs(path, options)
    else:
        yield _model(path, options)


def _model(path: str, options: ModelOptions) -> Subject:
    if options.precision:
        raise RunError(f"{path} is not a bundle, so it has no precisions; leave out --precision")
    if options.top_k and options.pooling not in (None, "mask"):
        raise RunError(f"--top-k needs mask pooling; leave out --pooling {options.pooling}")
    folder = encoder_folder(path)
    changes = _changes(options, CONFIG_OPTIONS)
    changes["denoising"] = changes.pop("denoise", None)
    templates = _changes(options, SEARCH_TEMPLATES)
    if options.top_k:
        if templates:
            raise RunError(f"--top-k uses one template for all texts; omit {_flags(templates)}")
        return _words(folder, options.top_k, changes)
    if _changes(options, CONFIG_OPTIONS).keys() <= {"max_tokens"} and _as_it_is(path):
        encoder = load_sentence_transformer(path, CHECKED, options.max_tokens)
    else:
        encoder = SentenceEncoder.load(folder, **changes)
    return _torch(encoder.to(fastest_device()), templates)


def applicable_options(path: str, options: ScoringOptions) -> ScoringOptions:
    """The options without those that do not apply to this model. Raises RunError."""
    kind = "server" if is_server(path) else kind_of(path)
    unused = [] if kind == "bundle" else ["precision"]
    if kind != "encoder" or saved_config(Path(path)) is not None or _as_it_is(path):
        unused += [*CONFIG_OPTIONS, *SEARCH_TEMPLATES, "top_k"]
    return options.model_copy(update=dict.fromkeys(unused))


def _as_it_is(path: str) -> bool:
    """Whether sentence-transformers' own configuration of an encoder is used."""
    return saved_config(Path(encoder_folder(path))) is None and kind_of(path) == "encoder" and of_library(path)


def _server(url: str, options: ModelOptions) -> Subject:
    changes = _changes(options, (*CONFIG_OPTIONS, *SEARCH_TEMPLATES, "precision", "top_k"))
    if changes:
        raise RunError(f"{url} is a server and its configuration is fixed; leave out {_flags(changes)}")
    server = ServerEncoder(url, key_of(options.key_file))
    queries, documents = (
        partial(server.embed, prompt=name) if name in server.templates else server.embed for name in SEARCH_NAMES
    )
    name = str(server.info["model_id"])
    return Subject(name, server.embed, queries, server.digest, embed_documents=documents)


def _graphs(path: str, options: ModelOptions) -> Iterator[Subject]:
    changes = _changes(options, (*CONFIG_OPTIONS, *SEARCH_TEMPLATES, "top_k"))
    if changes:
        raise RunError(f"{path} is a bundle and its configuration is fixed; leave out {_flags(changes)}")
    bundle = Bundle.load(path)
    for precision in [options.precision] if options.precision else bundle.precisions:
        graph = bundle.graph(precision)
        encoder = GraphEncoder.of(bundle, precision)
        queries, documents = map(encoder.named, SEARCH_NAMES)
        spec = bundle.spec.model_dump(mode="json", exclude={"provenance", "files"})
        files = {name: digest for name, digest in bundle.spec.files.items() if name.startswith("tokenizer")}
        digest = _digest(spec, files, bundle.spec.files[GRAPHS[precision]])
        size = graph.stat().st_size
        yield Subject(precision, encoder.embed, queries.embed, digest, size, embed_documents=documents.embed)


def _words(folder: str, k: int, changes: Mapping[str, Any]) -> Subject:
    words = MaskedWords.load(folder, **changes)
    digest = _digest("top", k, _model_digest(words.encoder), weights_digest(words.head))
    return Subject.of(f"torch fp32, top {k} tokens", partial(words.embed, k=k), digest)


def _torch(encoder: SentenceEncoder, templates: Mapping[str, str]) -> Subject:
    """`templates` replace, by option, the encoder's own templates for search queries and documents."""
    if templates and encoder.continuous is not None:
        raise RunError(f"{_flags(templates)} cannot replace this model's template, which is trained; omit the option")
    queries, documents = (
        encoder.within(templates[option]) if option in templates else encoder.named(name)
        for option, name in zip(SEARCH_TEMPLATES, SEARCH_NAMES, strict=True)
    )
    digest = _model_digest(encoder)
    if templates:
        digest = _digest(digest, templates)
    size = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    return Subject("torch fp32", encoder.embed, queries.embed, digest, size, encoder, documents.embed)


def is_server(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _changes(options: ModelOptions, names: Sequence[str]) -> dict[str, Any]:
    """The named options that are set."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _flags(names: Iterable[str]) -> str:
    return ", ".join(map(flag, names))


def _model_digest(encoder: SentenceEncoder) -> str:
    """The digest of weights, embedding configuration, tokenizer and what follows pooling, such as an activation."""
    tokenizer = encoder.tokenizer.backend_tokenizer.to_str()
    architecture = encoder.backbone.config.to_json_string()
    parts = weights_digest(encoder), encoder.config.model_dump(), tokenizer, architecture
    return _digest(*parts, *([repr(encoder.head)] if encoder.head else []))


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
