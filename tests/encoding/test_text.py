"""Texts to ids, on both kinds of tokenizer: the text is cut, the template never, and no text spells a special token."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace

from cloze.encoding.errors import BundleError, TemplateError, TextError, TextTooLong
from cloze.encoding.template import Template
from cloze.encoding.text import SpecialTokens, TextEncoder, Token, with_final_period

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
def test_equals_tokenising_the_whole_string(folder: Path, source: str) -> None:
    encoder = load(folder, source)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    mask = "" if encoder.special.mask is None else tokenizer.id_to_token(encoder.special.mask)
    for text in ("A man is playing.", "two dogs", "x"):
        whole = source.replace("[X]", text).replace("[MASK]", mask)
        assert ids(encoder, text) == tokenizer.encode(whole).ids


def test_roberta_gives_the_blank_before_the_text_to_its_first_word(tiny_roberta: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_roberta / "tokenizer.json"))
    quoted, blank = load(tiny_roberta, '"[X]" [MASK]'), load(tiny_roberta, "say [X] [MASK]")
    first = [tokenizer.id_to_token(ids(encoder, "dogs")[len(encoder.prefix_ids)]) for encoder in (quoted, blank)]
    assert not first[0].startswith("Ġ")
    assert first[1].startswith("Ġ")


@pytest.mark.parametrize("pre_tokenizer", [None, Metaspace()])
def test_a_unigram_text_spells_no_special_token(pre_tokenizer: Metaspace | None) -> None:
    """XLM-R's vocabulary holds its special tokens as pieces with the best score of all."""
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<mask>", 0.0)]
    pieces = [(piece, -3.0) for piece in ("▁", " ", "▁rain", " rain", "rain", "s", "mask", *"</>.")]
    tokenizer = Tokenizer(Unigram([*special, *pieces], unk_id=3))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([piece for piece, _ in special])
    encoder = TextEncoder(tokenizer, SpecialTokens(0, 2, 1, 4), Template.parse("rain [X] [MASK].", "mask"), 40)
    for text in ("</s>", "<mask>", "rain<s>rain </s> <mask>", " <s></s> "):
        inner = [token for token in encoder.explain(text) if not token.template]
        assert not any(token.special for token in inner)
        spans = [
            range(token.start, token.stop) for token in inner if token.start is not None and token.stop is not None
        ]
        covered = {place for span in spans for place in span}
        assert all(place in covered for place, character in enumerate(text) if not character.isspace())
        assert encoder.encode_ids([[token.id for token in inner]]) == encoder.encode([text])
    [rain] = (token for token in encoder.explain(" rain") if not token.template)
    assert (rain.start, rain.stop) == (1, 5)  # the word without the blank that the template gives it
    plain = tokenizer.encode(" rain", add_special_tokens=False).ids
    assert [token.id for token in encoder.explain("rain") if not token.template] == plain  # nothing else changes


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


def test_a_text_that_just_fits_is_not_cut(folder: Path) -> None:
    exact = len(ids(load(folder, max_tokens=400), "two dogs run"))
    assert load(folder, max_tokens=exact).encode(["two dogs run"], truncate=False)[0].cut == 0
    with pytest.raises(TextTooLong):
        load(folder, max_tokens=exact - 1).encode(["two dogs run"], truncate=False)


def test_refusing_truncation_names_the_text_and_the_limit(folder: Path) -> None:
    encoder = load(folder)
    with pytest.raises(TextTooLong, match=f"text 1 has .* at most {encoder.text_tokens} fit") as refused:
        encoder.encode(["short", LONG], truncate=False)
    assert refused.value.position == 1


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
    with pytest.raises(BundleError, match="does not name a sep_token"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": None}))
    assert load(tmp_path, "[X]").special.mask is None
    with pytest.raises(TemplateError, match="no mask token"):
        load(tmp_path)


def test_explain_spells_each_token_and_says_where_it_stands(tiny_bert: Path) -> None:
    encoder = load(tiny_bert, "[X] means [MASK].", max_tokens=64)
    text = "  Two dögs. 狗 \n"
    inner = [token for token in encoder.explain(text) if not token.template]
    joined = "".join(token.text.removeprefix("##") for token in inner if token.text != "[UNK]")
    assert joined == "twodogs."  # lower case, no accent: the vocabulary's spelling
    assert "".join(text[token.start : token.stop] for token in inner) == "Twodögs.狗"
    around = [token.text.removeprefix("##") for token in encoder.explain("x") if token.template]
    assert "".join(around) == "[CLS]means[MASK].[SEP]"


def test_explain_finds_every_character_of_a_byte_level_text(tiny_roberta: Path) -> None:
    encoder = load(tiny_roberta, "say [X] [MASK]", max_tokens=64)
    text = " \n two dogs 狗 😀é "
    inner = [token for token in encoder.explain(text) if not token.template]
    assert inner[0].text.startswith("Ġ")  # the template's blank, which is not in the text
    assert text[inner[0].start : inner[0].stop] == text.strip()[: inner[0].stop - 3]  # type: ignore[operator]
    spans = [range(token.start, token.stop) for token in inner if token.start is not None and token.stop is not None]
    covered = sorted({place for span in spans for place in span})
    assert [text[place] for place in covered if not text[place].isspace()] == list("twodogs狗😀é")
    assert covered[0] == 3
    assert sum(text[span.start : span.stop] == "😀" for span in spans) == 4  # a token for each of its bytes


def test_a_blank_alone_stands_nowhere_in_the_text(tiny_roberta: Path) -> None:
    encoder = load(tiny_roberta, "say [X] [MASK]", max_tokens=64)
    first, *rest = (token for token in encoder.explain("狗") if not token.template)
    assert first == Token(first.id, "Ġ", special=False, start=None, stop=None, template=False, cut=False)
    assert {(token.start, token.stop) for token in rest} == {(0, 1)}


def test_a_final_period_stands_nowhere_in_the_text(folder: Path) -> None:
    encoder = load(folder, final_period=True)
    added, own = (
        [token for token in encoder.explain(text) if not token.template][-1] for text in ("two dogs ", "two dogs.")
    )
    assert (added.id, added.text) == (own.id, own.text) == (own.id, ".")
    assert (added.start, added.stop) == (None, None)
    assert (own.start, own.stop) == (8, 9)


def test_a_token_of_the_texts_end_and_the_final_period_ends_with_the_text() -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "!": 1, ".": 2, "!.": 3}, [("!", ".")]))
    encoder = TextEncoder(tokenizer, SpecialTokens(4, 5, 6, None), Template.parse("[X]", "mean"), 9, final_period=True)
    inner = [token for token in encoder.explain(" a! ") if not token.template]
    assert [(token.text, token.start, token.stop) for token in inner] == [("a", 1, 2), ("!.", 2, 3)]


def test_ids_outside_the_vocabulary_are_refused(folder: Path) -> None:
    encoder = load(folder)
    [ordinary] = set(encoder.longest) - set(encoder.shortest)
    size = encoder.vocabulary_size
    for wrong in (-1, size, 2**32, 2**80):
        message = f"id {wrong} is outside the vocabulary of {size} tokens"
        with pytest.raises(TextError, match=f"text 1, place 2: {message}") as no:
            encoder.encode_ids([[ordinary], [ordinary, ordinary, wrong]])
        assert no.value.position == 1
        with pytest.raises(TextError, match=f"place 1: {message}"):
            encoder.decode([ordinary, wrong])
    encoder.encode_ids([[size - 2]])


def test_ids_of_special_tokens_are_refused(folder: Path) -> None:
    encoder = load(folder)
    for special in encoder.special.ids:
        with pytest.raises(TextError, match=f"text 0, place 0: id {special} is the special token .*leave it out") as no:
            encoder.encode_ids([[special]])
        assert no.value.position == 0


def test_ids_too_many_are_cut_or_refused(folder: Path) -> None:
    encoder = load(folder)
    inner = [token.id for token in encoder.explain("two dogs " * 100) if not token.template]
    with pytest.raises(TextTooLong, match=rf"text 1 has {len(inner)} tokens; at most {encoder.text_tokens} fit") as no:
        encoder.encode_ids([[], inner], truncate=False)
    assert no.value.position == 1
    [none, cut] = encoder.encode_ids([[], tuple(inner)], direction="left")
    assert none == (encoder.shortest, 0)
    assert cut.cut == len(inner) - encoder.text_tokens
    assert cut.ids == [*encoder.prefix_ids, *inner[cut.cut :], *encoder.suffix_ids]


def test_decode(folder: Path) -> None:
    encoder = load(folder, "[X] [MASK]")
    inner = [token.id for token in encoder.explain("two dogs run") if not token.template]
    mask = encoder.explain("")[1].text
    assert encoder.decode(inner).strip() == encoder.decode(ids(encoder, "two dogs run")).strip() == "two dogs run"
    assert mask not in encoder.decode(ids(encoder, "two dogs run"))
    assert mask in encoder.decode(ids(encoder, "two dogs run"), skip_special_tokens=False)
    assert encoder.decode([]) == ""


def test_the_shortest_and_the_longest(folder: Path) -> None:
    encoder = load(folder)
    assert encoder.shortest == ids(encoder, "")
    assert len(encoder.longest) == encoder.max_tokens
    inner = encoder.longest[len(encoder.prefix_ids) : -len(encoder.suffix_ids)]
    assert encoder.encode_ids([inner], truncate=False) == [(encoder.longest, 0)]  # ordinary: no special id among them


def test_the_longest_of_a_vocabulary_of_special_tokens_alone() -> None:
    tokenizer = Tokenizer(WordLevel({"c": 0, "s": 1, "p": 2}, "p"))
    encoder = TextEncoder(tokenizer, SpecialTokens(0, 1, 2, None), Template.parse("[X]", "mean"), 5)
    assert encoder.longest == [0, 1, 1, 1, 1]


def test_a_text_that_the_tokenizer_cannot_take_is_named(folder: Path) -> None:
    encoder = load(folder)
    with pytest.raises(TextError, match=r"text 2 cannot be tokenised \(TypeError: ") as refused:
        encoder.encode(["a", "b", "lone \ud800"])
    assert refused.value.position == 2
    with pytest.raises(TextError, match="text 0 cannot be tokenised"):
        encoder.explain("lone \ud800")
    assert len(encoder.encode(["a", "b"])) == 2


def test_positions_are_counted_from_first(folder: Path) -> None:
    encoder = load(folder)
    inner = [token.id for token in encoder.explain(LONG) if not token.template]
    with pytest.raises(TextTooLong, match="text 65 has") as too_long:
        encoder.encode(["a", LONG], truncate=False, first=64)
    with pytest.raises(TextTooLong, match="text 65 has") as too_many:
        encoder.encode_ids([[], inner], truncate=False, first=64)
    with pytest.raises(TextError, match="text 65, place 0") as unknown:
        encoder.encode_ids([[], [-1]], first=64)
    with pytest.raises(TextError, match="text 65") as broken:
        encoder.encode(["a", "\ud800"], first=64)
    assert {error.value.position for error in (too_long, too_many, unknown, broken)} == {65}


def test_a_tokenizer_without_the_unknown_token_says_so() -> None:
    tokenizer = Tokenizer(WordLevel({"c": 0, "s": 1, "p": 2, "rain": 3}, "[UNK]"))
    encoder = TextEncoder(tokenizer, SpecialTokens(0, 1, 2, None), Template.parse("[X]", "mean"), 5)
    with pytest.raises(TextError, match=r"text 1 cannot be tokenised .*\[UNK\]") as refused:
        encoder.encode(["rain", "snow"])
    assert refused.value.position == 1
