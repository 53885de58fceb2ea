"""Which tokens are hidden, and what stands there instead: shares, words, and nothing else touched."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from cloze.training.data.masking import mask_tokens, maskable_tokens

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
def test_special_tokens_and_padding_are_never_chosen(family: str, tiny_bert: Path, tiny_roberta: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained({"bert": tiny_bert, "roberta": tiny_roberta}[family])
    batch = tokenizer(["Two dogs run.", "", "A man is playing the guitar on a stage."], padding=True)
    ids = torch.tensor(batch["input_ids"])
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    maskable = maskable_tokens(ids, tokenizer)
    assert torch.equal(maskable, ~torch.isin(ids, torch.tensor(special)))
    for _ in range(50):
        after, chosen = mask_tokens(ids, maskable, 0.9, tokenizer.mask_token_id, len(tokenizer))
        assert not chosen[~maskable].any()
        assert torch.equal(after[~maskable], ids[~maskable])
