"""Texts to ids, on both kinds of tokenizer: the text is cut, the template never, and no text spells a special token."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from encoding.errors import BundleError, TemplateError, TextTooLong
from encoding.template import Template
from encoding.text import SpecialTokens, TextEncoder, with_final_period

QUOTED = 'This sentence of "[X]" means [MASK].'
LONG = "rain " * 200
TEXTS = ["A man is playing.", "", "two dogs", "Nothing grows here without a little rain.", LONG]


@pytest.fixture(params=["tiny_bert", "tiny_roberta"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def load(folder: Path, source: str = QUOTED, max_tokens: int = 40, final_period: bool = False) -> TextEncoder:
    template = Template.parse(source, "mask" if "[MASK]" in source else "mean")
    return TextEncoder.load(folder, template, max_tokens, final_period)


def ids(encoder: TextEncoder, text: str) -> list[int]:
    return encoder.encode([text])[0].ids


@pytest.mark.parametrize("source", [QUOTED, "[X] means [MASK] .", "[MASK] is what [X] means", "say: [X]", "[X]"])
@pytest.mark.parametrize("text", ["A man is playing.", "two dogs", "x"])
def test_equals_tokenising_the_whole_string(folder: Path, source: str, text: str) -> None:
    encoder = load(folder, source)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    mask = "" if encoder.special.mask is None else tokenizer.id_to_token(encoder.special.mask)
    whole = source.replace("[X]", text).replace("[MASK]", mask)
    assert ids(encoder, text) == tokenizer.encode(whole).ids


def test_roberta_gives_the_blank_before_the_text_to_its_first_word(tiny_roberta: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_roberta / "tokenizer.json"))
    quoted, blank = load(tiny_roberta, '"[X]" [MASK]'), load(tiny_roberta, "say [X] [MASK]")
    first = [tokenizer.id_to_token(ids(encoder, "dogs")[len(encoder.prefix_ids)]) for encoder in (quoted, blank)]
    assert not first[0].startswith("Ġ")
    assert first[1].startswith("Ġ")


@pytest.mark.parametrize("text", ["[MASK]", "a [SEP] b", "<mask>", "</s><s>", "[CLS] [PAD]", "<pad>"])
def test_special_tokens_in_a_text_stay_text(folder: Path, text: str) -> None:
    encoder = load(folder)
    inner = ids(encoder, text)[len(encoder.prefix_ids) : -len(encoder.suffix_ids)]
    special = encoder.special
    assert inner
    assert not {special.cls, special.sep, special.pad, special.mask} & set(inner)


def test_the_mask_stands_once_and_at_its_index(folder: Path) -> None:
    for source, negative in ((QUOTED, True), ("[MASK] means [X]", False), ("a [MASK] for [X] !", False)):
        encoder = load(folder, source)
        index = encoder.mask_index
        assert index is not None
        assert (index < 0) is negative
        for text in (*TEXTS, "[MASK] [MASK]", "<mask>"):
            sequence = ids(encoder, text)
            assert sequence.count(encoder.special.mask) == 1
            assert sequence[index] == encoder.special.mask


def test_a_plain_template_has_no_mask_index(folder: Path) -> None:
    assert load(folder, "[X]").mask_index is None


@pytest.mark.parametrize("direction", ["left", "right"])
def test_truncation_never_touches_the_template(folder: Path, direction: str) -> None:
    encoder = load(folder, max_tokens=30)
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    whole = load(folder, max_tokens=400)
    inner = ids(whole, text)[len(whole.prefix_ids) : -len(whole.suffix_ids)]
    [tokens] = encoder.encode([text], direction=direction)  # type: ignore[arg-type]
    kept = inner[-encoder.text_tokens :] if direction == "left" else inner[: encoder.text_tokens]
    assert tokens.ids == [*encoder.prefix_ids, *kept, *encoder.suffix_ids]
    assert tokens.cut == len(inner) - encoder.text_tokens > 0
    assert len(tokens.ids) == 30


def test_a_text_that_just_fits_is_not_cut(folder: Path) -> None:
    exact = len(ids(load(folder, max_tokens=400), "two dogs run"))
    assert load(folder, max_tokens=exact).encode(["two dogs run"], truncate=False)[0].cut == 0
    with pytest.raises(TextTooLong):
        load(folder, max_tokens=exact - 1).encode(["two dogs run"], truncate=False)


def test_refusing_truncation_names_the_text_and_the_limit(folder: Path) -> None:
    encoder = load(folder)
    with pytest.raises(TextTooLong, match=f"text 1 has .* at most {encoder.text_tokens} fit"):
        encoder.encode(["short", LONG], truncate=False)


def test_a_template_too_long_for_the_limit_is_refused(folder: Path) -> None:
    needed = load(folder).template_tokens + 1
    load(folder, max_tokens=needed)
    with pytest.raises(TemplateError, match=f"raise max_tokens to {needed}"):
        load(folder, max_tokens=needed - 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("", ""), ("a", "a."), ("a.", "a."), ('a"', 'a"'), ("a?", "a?"), ("a'", "a'"), ("a!", "a!.")]
)
def test_final_period(text: str, expected: str) -> None:
    assert with_final_period(text) == expected


def test_the_final_period_is_given_to_the_stripped_text(folder: Path) -> None:
    with_period, without = load(folder, final_period=True), load(folder)
    assert ids(with_period, " two dogs \n") == ids(without, "two dogs.")
    assert ids(with_period, "two dogs?") == ids(without, "two dogs?")
    assert ids(with_period, "  ") == ids(without, "")


def test_an_empty_text_is_the_template_alone(folder: Path) -> None:
    encoder = load(folder)
    assert ids(encoder, "") == ids(encoder, " \t\n") == [*encoder.prefix_ids, *encoder.suffix_ids]


def test_one_by_one_equals_batched(folder: Path) -> None:
    encoder = load(folder)
    batch = encoder.batch(TEXTS)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int64
    assert batch.input_ids.shape == batch.attention_mask.shape == (len(TEXTS), 40)
    for row, text in enumerate(TEXTS):
        length = batch.attention_mask[row].sum()
        assert batch.attention_mask[row].tolist() == [1] * length + [0] * (40 - length)
        assert batch.input_ids[row, :length].tolist() == ids(encoder, text)
        assert (batch.input_ids[row, length:] == encoder.special.pad).all()


def test_no_texts_are_an_empty_batch(folder: Path) -> None:
    assert load(folder).batch([]).input_ids.shape == (0, 0)


def test_the_callers_tokenizer_stays_as_it_was(tiny_bert: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_bert / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    special = SpecialTokens.load(tiny_bert, tokenizer)
    TextEncoder(tokenizer, special, Template.parse("[X]", "mean"), 20)
    assert tokenizer.truncation is not None
    assert tokenizer.encode("[MASK]", add_special_tokens=False).ids == [special.mask]


def test_a_broken_tokenizer_is_named(tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a readable tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tiny_bert / "tokenizer.json").read_bytes())
    with pytest.raises(BundleError, match=r"tokenizer_config\.json cannot be read"):
        load(tmp_path)
    config = json.loads((tiny_bert / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"sep_token": None}))
    with pytest.raises(BundleError, match="names no sep_token"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": None}))
    assert load(tmp_path, "[X]").special.mask is None
    with pytest.raises(TemplateError, match="no mask token"):
        load(tmp_path)
