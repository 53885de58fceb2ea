"""Write a sentence encoder as a sentence-transformers model, and read such a model again.

Files written in addition to an encoder's own (weights, tokenizer, embedding_config.json):

    modules.json, config_sentence_transformers.json      always
    sentence_bert_config.json, N_Pooling/config.json     sentence-transformers' own modules: a text alone, [CLS] or mean
    1_WordWeights/config.json                            the same, for token weights
    prompted_transformer.py                              any other template, [MASK], denoising or a head: custom code
"""

import inspect
import json
import shutil
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloze.adoption.modules import MODULES_FILE, ST_CONFIG_FILE
from cloze.encoding.template import TEXT
from cloze.training.encoder_source import CONFIG_FILE
from cloze.training.errors import EncoderError, ExportError
from cloze.training.model.encoder import SHORT, SentenceEncoder
from cloze.training.model.pretrained import quiet
from cloze.training.model.token_weights import WORD_WEIGHTS_FILE, TokenWeights

LARGEST_DIFFERENCE: Final = 1e-5  # of a normalised vector from torch's
ADOPT: Final = "make a bundle of it with `cloze adopt`"
CODE: Final = Path(__file__).parent / "prompted_transformer.py"
CUSTOM: Final = "prompted_transformer.PromptedTransformer"
TRANSFORMER: Final = "sentence_transformers.base.modules.transformer.Transformer"
WORD_WEIGHTS: Final = "sentence_transformers.sentence_transformer.modules.word_weights.WordWeights"
POOLING: Final = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
NORMALIZE: Final = "sentence_transformers.base.modules.normalize.Normalize"


def check_words_only(encoder: SentenceEncoder) -> None:
    """Raises ExportError for a template of trained vectors."""
    if encoder.continuous is not None:
        raise ExportError(
            "a continuous template cannot become a sentence-transformers model: it consists of trained vectors, and "
            "the files can hold only words; use its bundle with Cloze, exported without --sentence-transformers"
        )


def write(encoder: SentenceEncoder, folder: Path, texts: Sequence[str]) -> str:
    """Write the encoder into `folder` so that sentence-transformers loads it, and compare the vectors of `texts`.

    Return a section for the model card. Raises ExportError if the model cannot be written in this way, or if a vector
    differs.
    """
    check_words_only(encoder)
    library = import_module("sentence_transformers")
    encoder.save(folder)
    plain = _is_plain(encoder, texts)
    weighed = [WORD_WEIGHTS] if encoder.token_weights is not None else []
    types = [TRANSFORMER, *weighed, POOLING, NORMALIZE] if plain else [CUSTOM, NORMALIZE]
    paths = ["", *(f"{place}_{name.rpartition('.')[2]}" for place, name in enumerate(types[1:], 1))]
    modules = zip(paths, types, strict=True)
    rows = [
        {"idx": place, "name": str(place), "path": path, "type": name} for place, (path, name) in enumerate(modules)
    ]
    _write_json(folder / MODULES_FILE, rows)
    prompts = {
        name: template.removesuffix(TEXT) if plain else template for name, template in encoder.config.templates.items()
    }
    versions = {"sentence_transformers": version("sentence-transformers")}
    about = {"model_type": "SentenceTransformer", "prompts": prompts, "default_prompt_name": None}
    _write_json(folder / ST_CONFIG_FILE, {**about, "similarity_fn_name": "cosine", "__version__": versions})
    if plain:
        (folder / CONFIG_FILE).unlink()
        _write_plain(encoder, folder, folder / paths[-2])
    else:
        shutil.copyfile(CODE, folder / CODE.name)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes them private, and a service may run as another user
    _compare(encoder, folder, texts, library, plain)
    trust = "" if plain else f", trust_remote_code=True)` runs `{CODE.name}` of this folder and"
    return f"## sentence-transformers\n\n`SentenceTransformer(FOLDER{trust or ')`'} gives the same vectors, normalised."


def is_sentence_transformer(folder: Path) -> bool:
    """Whether sentence-transformers can load a folder."""
    return (folder / MODULES_FILE).is_file()


def saved_settings(folder: Path) -> dict[str, Any]:
    """The EmbeddingConfig fields of a folder that `write` wrote, or that sentence-transformers saved again.

    Raises EncoderError for any other sentence-transformers model.
    """
    try:
        types = [row["type"].rpartition(".")[2] for row in _read_json(folder / MODULES_FILE)]
        config = _read_json(folder / ST_CONFIG_FILE)
        prompts = config.get("prompts", {})
        if config.get("default_prompt_name") or config.get("truncate_dim"):
            raise EncoderError(
                f"{folder} has a default prompt or shorter vectors, which did not come from Cloze; {ADOPT}"
            )
        if types == ["PromptedTransformer", "Normalize"]:
            settings: dict[str, Any] = _read_json(folder / CONFIG_FILE)
        elif types in (["Transformer", "Pooling", "Normalize"], ["Transformer", "WordWeights", "Pooling", "Normalize"]):
            pooling = _read_json(folder / f"{types.index('Pooling')}_Pooling" / "config.json")
            settings = {"template": TEXT, "pooling": pooling["pooling_mode"]}
            if not pooling.get("include_prompt", True):
                raise EncoderError(
                    f"{folder} excludes the prompt's tokens from its pooling, which did not come from Cloze; {ADOPT}"
                )
            limit = _read_json(folder / "tokenizer_config.json").get("model_max_length")
            settings["max_tokens"] = _read_json(folder / "sentence_bert_config.json").get("max_seq_length", limit)
        else:
            raise EncoderError(
                f"{folder} has the sentence-transformers modules {', '.join(types)}, which did not come from "
                f"`cloze export --sentence-transformers`; {ADOPT}"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EncoderError(f"{folder} has no settings that Cloze wrote ({error!r}); {ADOPT}") from error
    template = settings["template"]
    templates = {
        name: prompt if TEXT in prompt else template.replace(TEXT, prompt + TEXT)
        for name, prompt in prompts.items()
        if prompt
    }
    return settings | {"templates": templates}


def _is_plain(encoder: SentenceEncoder, texts: Sequence[str]) -> bool:
    """Whether sentence-transformers' own modules give the same ids for `texts`, with and without surrounding blanks.

    They leave the blanks around a text to the tokenizer, and RoBERTa's tokenizer makes tokens of them.
    """
    config = encoder.config
    if config.pooling == "mask" or config.template != TEXT or config.final_period or config.denoising or encoder.head:
        return False
    if not all(template.endswith(TEXT) for template in config.templates.values()):
        return False
    own = encoder.text_encoder
    texts = [*texts, "   ", *(f" {text}\n" for text in texts)]
    prefixes = ["", *(template.removesuffix(TEXT) for template in config.templates.values())]
    for prefix, text_encoder in zip(prefixes, [own, *config.named_encoders(own).values()], strict=True):
        ids = encoder.tokenizer(
            [prefix + text for text in texts], truncation=True, max_length=config.max_tokens, split_special_tokens=True
        )["input_ids"]
        if ids != [tokens.ids for tokens in text_encoder.encode(texts)]:
            return False
    return True


def _write_plain(encoder: SentenceEncoder, folder: Path, pooling: Path) -> None:
    """Write the modules' settings; `pooling` is the folder of the module Pooling."""
    text = {"split_special_tokens": True}  # "[MASK]" in a text is text
    settings: dict[str, Any] = {
        "max_seq_length": encoder.config.max_tokens,
        "do_lower_case": False,
        "processing_kwargs": {"text": text},
    }
    if "add_pooling_layer" in inspect.signature(type(encoder.backbone)).parameters:
        settings["model_kwargs"] = {"add_pooling_layer": False}  # the weights do not include it
    _write_json(folder / "sentence_bert_config.json", settings)
    if encoder.token_weights is not None:
        (folder / WORD_WEIGHTS_FILE).parent.mkdir(exist_ok=True)
        _write_json(folder / WORD_WEIGHTS_FILE, _word_weights(encoder, encoder.token_weights))
    pooling.mkdir(exist_ok=True)
    modes = {"embedding_dimension": encoder.dimension, "pooling_mode": encoder.config.pooling, "include_prompt": True}
    _write_json(pooling / "config.json", modes)


def _word_weights(encoder: SentenceEncoder, weights: TokenWeights) -> dict[str, Any]:
    """The settings of the module WordWeights: the token and the weight of each row of the embeddings."""
    table = weights.table.squeeze(1).tolist()
    tokens = encoder.tokenizer.convert_ids_to_tokens(list(range(len(table))))
    vocab = [token or f"[unused row {row}]" for row, token in enumerate(tokens)]
    return {"vocab": vocab, "word_weights": dict(zip(vocab, table, strict=True)), "unknown_word_weight": 1}


def _compare(encoder: SentenceEncoder, folder: Path, texts: Sequence[str], library: Any, plain: bool) -> None:
    with quiet():
        if plain:
            model = library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        else:
            custom = import_module("cloze.training.hub.prompted_transformer").PromptedTransformer.load(str(folder))
            normalize = import_module("sentence_transformers.base.modules").Normalize()
            model = library.SentenceTransformer(modules=[custom, normalize], device="cpu")
        vectors = model.encode(list(texts), show_progress_bar=False)
    expected = encoder.embed(texts)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    pointed = lengths[:, 0] > SHORT * lengths.max()  # a denoised empty text is almost 0; its direction is noise
    largest = float(np.abs(vectors - expected / np.maximum(lengths, 1e-12))[pointed].max())
    if not largest <= LARGEST_DIFFERENCE:
        raise ExportError(
            f"sentence-transformers' vectors differ from torch's by {largest:.1e}, the limit is "
            f"{LARGEST_DIFFERENCE:.0e}; nothing was written. This is a bug: please report it with the recipe"
        )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
