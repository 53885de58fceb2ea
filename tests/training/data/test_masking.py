"""Which tokens are hidden, and what stands there instead: shares, words, and nothing else touched."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cloze.training.data.masking import continuing_tokens, mask_tokens, maskable_tokens
from cloze.training.errors import EncoderError

VOCABULARY = 50_000  # a random token is hardly ever the one it replaces
MASK = 4
N = 400_000


def near(measured: float, expected: float) -> bool:
    """Within 5 standard deviations of a share of N draws."""
    return abs(measured - expected) < 5 * (expected * (1 - expected) / N) ** 0.5


@pytest.mark.parametrize(("share", "masked", "random", "kept"), [(0.15, 0.12, 0.015, 0.015), (0.3, 0.24, 0.03, 0.03)])
def test_of_the_chosen_tokens_80_10_10_percent(share: float, masked: float, random: float, kept: float) -> None:
    torch.manual_seed(0)
    ids = torch.randint(10, VOCABULARY, (N // 100, 100))
    before = ids.clone()
    after, chosen = mask_tokens(ids, torch.ones_like(ids, dtype=torch.bool), share, MASK, VOCABULARY)
    assert torch.equal(ids, before)
    assert torch.equal(after[~chosen], ids[~chosen])
    hidden, same = chosen & (after == MASK), chosen & (after == ids)
    assert near(chosen.float().mean().item(), share)
    assert near(hidden.float().mean().item(), masked)
    assert near(same.float().mean().item(), kept)
    assert near((chosen & ~hidden & ~same).float().mean().item(), random)


def test_random_tokens_come_from_the_whole_vocabulary() -> None:
    torch.manual_seed(0)
    ids = torch.full((200, 100), 7)
    after, _ = mask_tokens(ids, torch.ones_like(ids, dtype=torch.bool), 0.9, MASK, 12)
    assert after.unique().tolist() == list(range(12))


def test_each_call_draws_anew_and_a_seed_repeats_it() -> None:
    ids = torch.randint(10, VOCABULARY, (8, 100))
    everywhere = torch.ones_like(ids, dtype=torch.bool)

    def draw() -> torch.Tensor:
        return mask_tokens(ids, everywhere, 0.3, MASK, VOCABULARY)[1]

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(draw(), first)
    # independent copies agree on .3 x .3 + .7 x .7 of the tokens
    assert 0.45 < (first == second).float().mean().item() < 0.7


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_and_padding_are_never_chosen(
    family: str, whole_words: bool, tiny_bert: Path, tiny_roberta: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained({"bert": tiny_bert, "roberta": tiny_roberta}[family])
    batch = tokenizer(["Two dogs run.", "", "A man is playing the guitar on a stage."], padding=True)
    ids = torch.tensor(batch["input_ids"])
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    maskable = maskable_tokens(ids, tokenizer)
    assert torch.equal(maskable, ~torch.isin(ids, torch.tensor(special)))
    continuing = continuing_tokens(tokenizer) if whole_words else None
    for _ in range(50):
        after, chosen = mask_tokens(ids, maskable, 0.9, tokenizer.mask_token_id, len(tokenizer), continuing)
        assert not chosen[~maskable].any()
        assert torch.equal(after[~maskable], ids[~maskable])


def words_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Ids (1, L) and where each word between blanks begins and ends, found by the tokenizer's own offsets."""
    encoding = tokenizer(text, return_offsets_mapping=True)
    spans, at = [], 0
    for word in text.split():
        begin = text.index(word, at)
        at = begin + len(word)
        inside = [
            place
            for place, (left, right) in enumerate(encoding["offset_mapping"])
            if right > left and right > begin and left < at
        ]
        spans.append((inside[0], inside[-1] + 1))
    return torch.tensor([encoding["input_ids"]]), spans


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_whole_words_are_hidden_whole_or_not_at_all(family: str, tiny_bert: Path, tiny_roberta: Path) -> None:
    """The first word of RoBERTa has no mark of its own, and is a word nevertheless."""
    tokenizer = AutoTokenizer.from_pretrained({"bert": tiny_bert, "roberta": tiny_roberta}[family])
    ids, spans = words_of(tokenizer, "dogstage guitarfields announced letterman raincity")
    assert tokenizer.unk_token_id not in ids
    assert max(end - begin for begin, end in spans) > 2
    continuing = continuing_tokens(tokenizer)
    rows = ids.expand(4000, -1)
    torch.manual_seed(0)
    maskable = maskable_tokens(rows, tokenizer)
    _, chosen = mask_tokens(rows, maskable, 0.3, tokenizer.mask_token_id, len(tokenizer), continuing)
    shares = []
    for begin, end in spans:
        word = chosen[:, begin:end]
        assert torch.equal(word.all(1), word.any(1))
        shares.append(word[:, 0].float())
    picked = torch.stack(shares, dim=1)  # (4000, words)
    assert (picked.mean(0) - 0.3).abs().max() < 5 * (0.21 / 4000) ** 0.5
    agreement = (picked[:, :1] == picked[:, 1:]).float().mean(0)  # words are drawn apart: .09 + .49
    assert (agreement - 0.58).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_a_row_without_special_tokens_has_words_as_well() -> None:
    """Nothing goes on a word that would have begun behind the row's end."""
    ids = torch.tensor([[11, 10, 11, 11]])
    continuing = torch.arange(12) == 11
    torch.manual_seed(0)
    for _ in range(50):
        _, chosen = mask_tokens(ids, torch.ones_like(ids, dtype=torch.bool), 0.5, MASK, 12, continuing)
        assert chosen[0, 1] == chosen[0, 2] == chosen[0, 3]


def test_byte_pairs_that_look_like_word_pieces_begin_no_word(tiny_roberta: Path) -> None:
    """RoBERTa's vocabulary has tokens that spell ##."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_roberta)
    tokenizer.add_tokens(["##"])
    continuing = continuing_tokens(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert [name for name, goes_on in zip(names, continuing.tolist(), strict=True) if not goes_on] == [
        name for name in names if name.startswith("Ġ")
    ]


def test_a_tokenizer_without_marks_has_no_whole_words() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(EncoderError, match="leave out whole_words"):
        continuing_tokens(words)
