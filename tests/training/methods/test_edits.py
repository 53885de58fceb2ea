"""Editing by hand-made generators: what stands in the edited sentence, and what the discriminator is asked for."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from cloze.training.data.masking import mask_tokens, maskable_tokens
from cloze.training.errors import EncoderError
from cloze.training.methods.edits import Edited, Editor
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.views import view

SENTENCES = ["Two dogs run over the green field.", "She wrote a letter to her old friend in the city.", "Rain.", ""]
KINDS = ["replace", "insert", "delete"]


class Speaker(nn.Module):
    """A generator with a fixed output: everywhere the words of highest score, or the word it reads."""

    def __init__(self, scores: Tensor | None = None, vocabulary: int = 0) -> None:
        super().__init__()
        self.scores = scores
        self.vocabulary = vocabulary
        self.read: list[Tensor] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        self.read.append(input_ids)
        if self.scores is None:
            return SimpleNamespace(logits=torch.eye(self.vocabulary)[input_ids])
        return SimpleNamespace(logits=self.scores.repeat(*input_ids.shape, 1))


def speaker(tokenizer: object, *words: int) -> Speaker:
    """Prefers the first of the words to the second, and so on; without words it repeats what it reads."""
    if not words:
        return Speaker(vocabulary=len(tokenizer))
    scores = torch.zeros(len(tokenizer))
    scores[list(words)] = torch.arange(len(words), 0, -1).float()
    return Speaker(scores)


@pytest.fixture(params=["bert", "roberta"])
def encoder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> SentenceEncoder:
    """RoBERTa pads by 1, BERT by 0."""
    folder = {"bert": tiny_bert, "roberta": tiny_roberta}[request.param]
    return SentenceEncoder.load(str(folder), template="[X]", pooling="cls")


def batch(encoder: SentenceEncoder, copies: int = 1) -> dict[str, Tensor]:
    return view(encoder.text_encoder, SENTENCES * copies)


def rows(edited: Edited) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each row without its padding."""
    lengths = edited.attention_mask.sum(1).tolist()
    return [
        (ids[:length], labels[:length])
        for ids, labels, length in zip(edited.input_ids.tolist(), edited.labels.tolist(), lengths, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guessing", ["best", "sampled"])
def test_cls_stays_first_padding_last_and_neither_is_labelled(
    kind: str, guessing: str, encoder: SentenceEncoder
) -> None:
    tokenizer = encoder.tokenizer
    texts = batch(encoder)
    before = texts["input_ids"].clone()
    torch.manual_seed(0)
    # it would say [PAD] if it could; then RoBERTa would lose count of its positions
    editor = Editor(speaker(tokenizer, tokenizer.pad_token_id, 20), tokenizer, 0.5, guessing)
    edited = editor.edit(kind, **texts)
    assert edited.input_ids.shape == edited.attention_mask.shape == edited.labels.shape
    assert (edited.input_ids[:, 0] == tokenizer.cls_token_id).all()
    assert (edited.labels[:, 0] == 0).all()
    assert torch.equal(edited.input_ids == tokenizer.pad_token_id, edited.attention_mask == 0)
    assert (edited.labels[edited.attention_mask == 0] == 0).all()
    assert torch.equal(edited.attention_mask, edited.attention_mask.sort(dim=1, descending=True).values)
    assert edited.labels.sum() > 0
    assert torch.equal(texts["input_ids"], before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guessing", ["best", "sampled"])
def test_with_nothing_masked_and_a_generator_that_repeats_nothing_is_edited(
    kind: str, guessing: str, encoder: SentenceEncoder
) -> None:
    texts = batch(encoder)
    edited = Editor(speaker(encoder.tokenizer), encoder.tokenizer, 0.0, guessing).edit(kind, **texts)
    assert torch.equal(edited.input_ids, texts["input_ids"])
    assert torch.equal(edited.attention_mask, texts["attention_mask"])
    assert not edited.labels.any()


def test_the_best_word_is_taken_at_every_position(encoder: SentenceEncoder) -> None:
    texts = batch(encoder)
    edited = Editor(speaker(encoder.tokenizer, 20), encoder.tokenizer, 0.3, "best").edit("replace", **texts)
    for (ids, labels), given in zip(rows(edited), texts["input_ids"].tolist(), strict=True):
        assert ids == [encoder.tokenizer.cls_token_id] + [20] * (len(ids) - 1)  # [SEP] is edited too
        assert labels == [int(new != old) for new, old in zip(ids, given, strict=False)]


def test_a_word_guessed_right_is_no_edit(encoder: SentenceEncoder) -> None:
    """A generator that knows the sentence gives it back whatever was masked."""
    texts = batch(encoder)
    oracle = Speaker(torch.eye(len(encoder.tokenizer))[texts["input_ids"]])
    oracle.forward = lambda input_ids, attention_mask: SimpleNamespace(logits=oracle.scores)
    edited = Editor(oracle, encoder.tokenizer, 0.5, "best").edit("replace", **texts)
    assert torch.equal(edited.input_ids, texts["input_ids"])
    assert not edited.labels.any()


def test_sampled_words_stand_where_one_was_masked_only(encoder: SentenceEncoder) -> None:
    texts = batch(encoder, copies=200)
    torch.manual_seed(0)
    spoken, shares = [20, 21, 22, 23, 24], [0.6, 0.1, 0.1, 0.1, 0.1]
    scores = torch.full((len(encoder.tokenizer),), -torch.inf)
    scores[spoken] = torch.tensor(shares).log()
    edited = Editor(Speaker(scores), encoder.tokenizer, 0.3, "sampled").edit("replace", **texts)
    text = maskable_tokens(texts["input_ids"], encoder.tokenizer)
    assert not edited.labels[~text].any()
    assert int(edited.labels.sum()) / int(text.sum()) == pytest.approx(0.3, abs=0.03)
    strange = edited.labels.bool() & ~torch.isin(texts["input_ids"], torch.tensor(spoken))  # no draw is the word itself
    draws = edited.input_ids[strange]
    assert [float((draws == word).float().mean()) for word in spoken] == pytest.approx(shares, abs=0.04)


def test_masking_has_berts_shares_and_each_copy_its_own_draw(encoder: SentenceEncoder) -> None:
    """Of 0.3, 80 % are masked, 10 % a random token, 10 % stay: 0.24, 0.03, 0.03; special tokens never."""
    tokenizer = encoder.tokenizer
    ids = batch(encoder, copies=800)["input_ids"]
    text = maskable_tokens(ids, tokenizer)
    torch.manual_seed(0)
    masked, chosen = mask_tokens(ids, text, 0.3, tokenizer.mask_token_id, len(tokenizer))
    hidden = masked == tokenizer.mask_token_id
    other = (masked != ids) & ~hidden
    kept = chosen & (masked == ids)
    for fate, share in ((hidden, 0.24), (other, 0.03), (kept, 0.03)):
        deviation = math.sqrt(share * (1 - share) / int(text.sum()))
        assert float(fate[text].float().mean()) == pytest.approx(share, abs=4 * deviation)
    assert torch.equal(masked[~text], ids[~text])

    generator = speaker(tokenizer)
    editor = Editor(generator, tokenizer, 0.3, "best")
    texts = batch(encoder, copies=800)
    editor.edit("replace", **texts)
    parts = len(generator.read)
    editor.edit("replace", **texts)
    masks = [read == tokenizer.mask_token_id for read in generator.read]
    both = sum(int((first & second).sum()) for first, second in zip(masks[:parts], masks[parts:], strict=True))
    assert both / int(text.sum()) == pytest.approx(0.24**2, abs=0.01)


def test_the_generator_reads_little_padding_and_its_words_reach_their_rows(encoder: SentenceEncoder) -> None:
    """It repeats what it reads, in parts of similar length; so every row has to come back as it was masked."""
    texts = view(
        encoder.text_encoder, [" ".join(["dog"] * (20 if number % 16 == 0 else 1 + number % 4)) for number in range(96)]
    )
    generator = speaker(encoder.tokenizer)
    edited = Editor(generator, encoder.tokenizer, 0.0, "best").edit("replace", **texts)
    assert torch.equal(edited.input_ids, texts["input_ids"])
    assert len(generator.read) > 1
    assert sum(read.numel() for read in generator.read) < 0.8 * texts["input_ids"].numel()


@pytest.mark.parametrize("guessing", ["best", "sampled"])
def test_inserted_words_are_labelled_and_without_them_the_text_is_as_it_was(
    guessing: str, encoder: SentenceEncoder
) -> None:
    texts = batch(encoder, copies=200)
    torch.manual_seed(0)
    generator = speaker(encoder.tokenizer, 20)
    generator.scores[20] = 1000.0
    edited = Editor(generator, encoder.tokenizer, 0.15, guessing).edit("insert", **texts)
    masks = sum(int((read == encoder.tokenizer.mask_token_id).sum()) for read in generator.read)
    assert masks == int(edited.labels.sum())
    given = [
        ids[:length] for ids, length in zip(texts["input_ids"].tolist(), texts["attention_mask"].sum(1), strict=True)
    ]
    total = 0
    places = set()
    for (ids, labels), original in zip(rows(edited), given, strict=True):
        assert [token for token, label in zip(ids, labels, strict=True) if not label] == original
        assert all(token == 20 for token, label in zip(ids, labels, strict=True) if label)
        assert all(not (one and two) for one, two in pairwise(labels))
        expected = 0.15 * (len(original) - 2)
        assert int(expected) <= sum(labels) <= int(expected) + 1
        places |= {"after the last word" if labels[-2:] == [1, 0] else "inside"} if sum(labels) else set()
        total += sum(labels)
    words = sum(len(original) - 2 for original in given)
    assert total / words == pytest.approx(0.15, abs=0.01)
    assert places == {"after the last word", "inside"}


def test_a_token_is_labelled_where_the_one_before_it_is_gone(encoder: SentenceEncoder) -> None:
    """Tokens in rising order tell which are gone; [SEP], put last, is labelled where the last word is."""
    tokenizer = encoder.tokenizer
    lengths = [0, 1, 2, 7, 20, 31] * 100
    longest = max(lengths) + 2
    given = [[tokenizer.cls_token_id, *range(10, 10 + length), tokenizer.sep_token_id] for length in lengths]
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in given])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in given])
    torch.manual_seed(0)
    edited = Editor.load(None, tokenizer, 0.15).edit("delete", ids, attention)
    gone = 0
    for (left, labels), original in zip(rows(edited), given, strict=True):
        places = [original.index(token) for token in left]
        assert places == sorted(places)
        assert left[-1] == tokenizer.sep_token_id
        assert labels == [0] + [int(here != before + 1) for before, here in pairwise(places)]
        missing = len(original) - len(left)
        assert int(0.15 * (len(original) - 2)) <= missing <= int(0.15 * (len(original) - 2)) + 1
        gone += missing
    assert gone / sum(lengths) == pytest.approx(0.15, abs=0.01)
    assert edited.input_ids.shape[1] == int(edited.attention_mask.sum(1).max())


def test_the_generator_is_frozen_and_has_dropout(tiny_bert: Path) -> None:
    generator = BertForMaskedLM(BertConfig.from_pretrained(tiny_bert)).eval()
    editor = Editor(generator, AutoTokenizer.from_pretrained(tiny_bert), 0.3, "best")
    assert editor.generator.training
    assert not any(weight.requires_grad for weight in editor.generator.parameters())


def test_a_generator_of_another_vocabulary_is_refused(tiny_bert: Path, tiny_roberta: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    with pytest.raises(EncoderError, match=r"does not have the encoder's vocabulary: \d+ of the encoder's \d+ tokens"):
        Editor.load(str(tiny_roberta), tokenizer, 0.3)


def test_a_generator_without_a_masked_word_head_or_a_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    with pytest.raises(EncoderError, match="has no masked-word head"):
        Editor.load(str(tiny_bert), tokenizer, 0.3)
    with pytest.raises(EncoderError, match="cannot be loaded as a generator"):
        Editor.load(str(tmp_path), tokenizer, 0.3)


def test_a_generator_with_fewer_embeddings_than_words_is_refused(masked_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(masked_bert)
    tokenizer.save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(masked_bert, vocab_size=len(tokenizer) - 1)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match=r"has embeddings for \d+ tokens, but the encoder's tokenizer has"):
        Editor.load(str(tmp_path), tokenizer, 0.3)
