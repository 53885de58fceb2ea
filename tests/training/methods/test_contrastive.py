"""What every contrastive method shares: Matryoshka cuts, and texts that have little in them."""

from pathlib import Path

import pytest
import torch
from contrastive_methods import METHODS, add_masked_head, build
from torch import Tensor

from cloze.encoding.errors import ClozeError
from cloze.training.methods.losses import info_nce

TEMPERATURE = 0.05
ODD = ["[SEP] [PAD]", "[MASK]", "\u200b", "[CLS] a [MASK] b [SEP]", "?!"]  # special tokens as text; nothing visible


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return add_masked_head(tiny_bert, tmp_path_factory.mktemp("masked"))


def contrast(*vectors: Tensor) -> Tensor:
    return info_nce(*vectors[:2], TEMPERATURE, *vectors[2:])


@pytest.mark.parametrize("sizes", [["32"], ["8"], ["8", "32"], ["1", "5", "16", "31"]])
@pytest.mark.parametrize("columns", [2, 3])
def test_nested_is_the_mean_over_shorter_vectors(sizes: list[str], columns: int, tiny_bert: Path) -> None:
    objective = build("simcse", tiny_bert, dimensions=sizes)
    vectors = [torch.randn(6, 32, dtype=torch.float64) for _ in range(columns)]
    cut = [contrast(*(vector[:, : int(size)] for vector in vectors)) for size in sizes]
    torch.testing.assert_close(objective.nested(contrast, *vectors), torch.stack(cut).mean())
    turned = build("simcse", tiny_bert, dimensions=sizes[::-1])
    torch.testing.assert_close(turned.nested(contrast, *vectors), objective.nested(contrast, *vectors))


def test_without_dimensions_the_vectors_stay_whole(tiny_bert: Path) -> None:
    vectors = torch.randn(6, 32), torch.randn(6, 32)
    whole = contrast(*vectors)
    torch.testing.assert_close(build("simcse", tiny_bert).nested(contrast, *vectors), whole)
    torch.testing.assert_close(build("simcse", tiny_bert, dimensions=["32"]).nested(contrast, *vectors), whole)


def test_a_nested_method_cuts_before_its_head(tiny_bert: Path) -> None:
    """SimCSE on cut vectors, written out: what follows the cut is multiplied by no weight of the head."""
    rows = METHODS["triplets"][1]
    objective = build("simcse", tiny_bert, dropout=False, columns=["a", "b", "c"], dimensions=["4", "20"])
    views = objective.views(rows)
    vectors = [objective.encode(name, view) for name, view in views.items()]
    linear = objective.head[0]
    losses = [
        info_nce(*heads[:2], objective.recipe.temperature, heads[2])
        for size in (4, 20)
        for heads in [[torch.tanh(v[:, :size] @ linear.weight[:, :size].T + linear.bias) for v in vectors]]
    ]
    torch.testing.assert_close(objective(**views)["loss"], torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["8", "33"], "dimensions has 33; the encoder's vectors have 32: lower it"),
        (["8", "16", "8"], "dimensions has one size twice: 8, 16, 8; write each once"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: list[str], message: str, tiny_bert: Path) -> None:
    with pytest.raises(ClozeError, match=message):
        build("simcse", tiny_bert, dimensions=sizes)


@pytest.mark.parametrize("case", METHODS)
def test_texts_of_special_tokens_or_of_nothing_visible_train(case: str, encoder: Path) -> None:
    name, rows, words = METHODS[case]
    objective = build(name, encoder, **words)
    odd = [tuple(ODD[place - column] for column in range(len(row))) for place, row in enumerate(rows)]
    if objective.recipe.scored:
        odd = [(*texts[:-1], row[-1]) for texts, row in zip(odd, rows, strict=True)]
    outputs = objective(**objective.views(odd))
    outputs["loss"].backward()
    assert outputs["loss"].isfinite()
    assert all(weight.grad.isfinite().all() for weight in objective.parameters() if weight.grad is not None)


def test_a_mask_token_in_a_text_is_text(encoder: Path) -> None:
    objective = build("promptbert", encoder)
    ids = objective.views([("[MASK] [SEP] [MASK]",)])["first"]["input_ids"]
    assert (ids == objective.encoder.tokenizer.mask_token_id).sum() == 1
    assert (ids == objective.encoder.tokenizer.sep_token_id).sum() == 1
