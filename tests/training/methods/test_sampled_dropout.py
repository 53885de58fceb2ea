import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import truncnorm
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, DistilBertConfig, DistilBertModel, MPNetConfig, MPNetModel

from cloze.training.errors import EncoderError
from cloze.training.methods.ssimcse import Dropouts, SampledDropout, draw_rates
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.recipes.methods import Distribution, well_formed

TEXTS = ["Two dogs run.", "A man is playing the guitar on a stage.", "Rain.", "She wrote a letter to the city."]


def at(rates: list[float]) -> SampledDropout:
    dropout = SampledDropout(0.5).train()
    dropout.rates = torch.tensor(rates)
    return dropout


def four_sigma(rate: float, count: int) -> float:
    return 4 * math.sqrt(rate * (1 - rate) / count)


# --- rates -----------------------------------------------------------------------------------------------------------

TRUNCATED = truncnorm((0.05 - 0.1) / 0.08, (0.3 - 0.1) / 0.08, loc=0.1, scale=0.08)
MOMENTS = [
    ("fixed", [0.1], 0.1, 0.0),
    ("uniform", [0.0, 0.2], 0.1, 0.2 / math.sqrt(12)),  # 0.0577
    ("uniform", [0.3, 0.3], 0.3, 0.0),
    ("beta", [2.0, 18.0], 2 / 20, math.sqrt(2 * 18 / (20**2 * 21))),
    ("truncnormal", [0.1, 0.08, 0.05, 0.3], TRUNCATED.mean(), TRUNCATED.std()),
    ("choice", [0.0, 0.1, 0.35], 0.15, math.sqrt((0.15**2 + 0.05**2 + 0.2**2) / 3)),
]


@pytest.mark.parametrize(("distribution", "numbers", "mean", "deviation"), MOMENTS)
def test_rates_have_the_mean_and_deviation_of_their_distribution(
    distribution: Distribution, numbers: list[float], mean: float, deviation: float
) -> None:
    assert well_formed(distribution, numbers)
    torch.manual_seed(0)
    rates = draw_rates(distribution, numbers, (1000, 200)).double()
    assert rates.shape == (1000, 200)
    assert rates.mean().item() == pytest.approx(mean, abs=4 * deviation / math.sqrt(200_000) + 1e-7)
    assert rates.std().item() == pytest.approx(deviation, rel=0.01, abs=1e-7)


def test_rates_stay_within_their_limits_and_below_one() -> None:
    torch.manual_seed(0)
    uniform = draw_rates("uniform", [0.05, 0.2], (10_000,))
    assert uniform.min() >= 0.05
    assert uniform.max() <= 0.2
    cut = draw_rates("truncnormal", [0.1, 5.0, 0.05, 0.3], (10_000,))
    assert cut.min() >= 0.05
    assert cut.max() <= 0.3
    assert set(draw_rates("choice", [0.0, 0.25], (100,)).tolist()) == {0.0, 0.25}
    assert draw_rates("beta", [50.0, 0.01], (1000,)).max().item() == pytest.approx(0.99)  # 1 would leave nothing


NO_RATES: list[tuple[Distribution, list[float]]] = [
    *(("fixed", []), ("fixed", [1.0]), ("fixed", [0.1, 0.2])),
    *(("uniform", [0.2, 0.1]), ("uniform", [0.0, 1.0]), ("uniform", [0.1])),
    *(("beta", [0.0, 2.0]), ("beta", [2.0])),
    *(("truncnormal", [0.1, 0.0, 0.0, 0.2]), ("truncnormal", [0.3, 0.1, 0.0, 0.2]), ("truncnormal", [0.1, 0.1])),
    *(("truncnormal", [0.1, 0.1, 0.1, 0.1]), ("truncnormal", [0.1, 0.1, 0.0, 1.0])),
    *(("choice", []), ("choice", [0.1, 1.0])),
]


def test_numbers_that_are_no_distribution_of_rates() -> None:
    assert [each for each in NO_RATES if well_formed(*each)] == []


# --- one operation ---------------------------------------------------------------------------------------------------


def test_a_fixed_rate_has_the_statistics_of_nn_dropout() -> None:
    torch.manual_seed(0)
    rows = torch.randn(8, 50, 400).abs() + 0.5
    sampled, plain = at([0.1] * 8)(rows), nn.Dropout(0.1).train()(rows)
    for dropped in (sampled, plain):
        assert (dropped == 0).double().mean().item() == pytest.approx(0.1, abs=four_sigma(0.1, rows.numel()))
        left = dropped != 0
        torch.testing.assert_close(dropped[left], rows[left] / 0.9)
    assert sampled.mean().item() == pytest.approx(plain.mean().item(), rel=0.01)
    assert sampled.std().item() == pytest.approx(plain.std().item(), rel=0.01)
    assert not torch.equal(sampled[0] == 0, sampled[1] == 0)  # a mask a row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 400), (12, 100, 100)])  # (L, d), (heads, L, L)
def test_each_row_has_its_own_rate_and_keeps_its_mean(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rates = [0.0, 0.01, 0.05, 0.1, 0.3, 0.9, 0.99]
    dropped = at(rates)(torch.ones(len(rates), *shape, dtype=dtype))
    assert dropped.dtype == dtype
    for row, rate in zip(dropped, rates, strict=True):
        zeros = four_sigma(rate, row.numel())
        assert (row == 0).double().mean().item() == pytest.approx(rate, abs=zeros + 1e-12)
        assert row.double().mean().item() == pytest.approx(1, abs=zeros / (1 - rate) + torch.finfo(dtype).eps)
        assert row.max().item() == pytest.approx(1 / (1 - rate), rel=max(torch.finfo(dtype).eps, 1e-5))


def test_a_rate_of_zero_and_evaluation_change_nothing() -> None:
    rows = torch.randn(3, 5, 7)
    assert torch.equal(at([0.0] * 3)(rows), rows)
    assert torch.equal(at([0.9] * 3).eval()(rows), rows)


def test_without_rates_it_is_nn_dropout() -> None:
    rows = torch.randn(3, 5, 7)
    torch.manual_seed(1)
    expected = nn.Dropout(0.4)(rows)
    torch.manual_seed(1)
    assert torch.equal(SampledDropout(0.4)(rows), expected)


def test_one_random_state_gives_one_mask_and_another_another() -> None:
    dropout, rows = at([0.2, 0.5]), torch.ones(2, 40)
    state = torch.get_rng_state()
    first, other = dropout(rows), dropout(rows)
    torch.set_rng_state(state)
    assert torch.equal(dropout(rows), first)
    assert not torch.equal(other, first)


def test_the_gradient_passes_where_the_row_passed() -> None:
    rows = torch.randn(2, 30, requires_grad=True)
    dropped = at([0.2, 0.5])(rows)
    dropped.sum().backward()
    scale = torch.tensor([[1.25], [2.0]])
    torch.testing.assert_close(rows.grad, torch.where(dropped == 0, torch.zeros(()), scale.expand(2, 30)))


# --- a backbone ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> Path:
    return {"bert": tiny_bert, "roberta": tiny_roberta}[request.param]


def load(folder: Path) -> SentenceEncoder:
    return SentenceEncoder.load(str(folder), template="[X]", pooling="cls")


def batch(encoder: SentenceEncoder) -> dict[str, Tensor]:
    input_ids, attention_mask = map(torch.from_numpy, encoder.text_encoder.batch(TEXTS))
    assert not attention_mask.all()  # it is padded
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def test_every_dropout_of_two_layers_is_replaced(folder: Path) -> None:
    whole, hidden = load(folder), load(folder)
    assert len(Dropouts.install(whole.backbone)) == 7  # embeddings; attention's probabilities and output, feed-forward
    assert len(Dropouts.install(hidden.backbone, attention=False)) == 5
    assert all(type(m) is SampledDropout for m in whole.backbone.modules() if isinstance(m, nn.Dropout))
    assert sum(type(m) is nn.Dropout for m in hidden.backbone.modules()) == 2
    assert hidden.backbone.config._attn_implementation == "sdpa"


def test_with_rates_of_zero_a_training_pass_is_the_plain_encoder(folder: Path) -> None:
    plain, encoder = load(folder).eval(), load(folder)
    dropouts = Dropouts.install(encoder.backbone)
    views = batch(plain)
    with dropouts.at(torch.zeros(4, 7)):
        trained = encoder.train()(**views)
    torch.testing.assert_close(trained, plain(**views), atol=1e-5, rtol=1e-5)


def test_every_operation_drops_each_row_at_its_own_rate(folder: Path) -> None:
    """Hidden states (n, L, d) and attention's probabilities (n, heads, L, L), seen from outside."""
    encoder = load(folder).train()
    dropouts = Dropouts.install(encoder.backbone)
    zeros, counts = torch.zeros(7, 4), torch.zeros(7, 4)

    def count(number: int, given: Tensor, dropped: Tensor) -> None:
        live = given != 0  # a probability of padding is 0 before
        zeros[number] += ((dropped == 0) & live).flatten(1).sum(1)
        counts[number] += live.flatten(1).sum(1)
        torch.testing.assert_close(
            dropped, torch.where(dropped == 0, 0, given / (1 - rates[:, number].view(-1, *[1] * (given.dim() - 1))))
        )

    for number, module in enumerate(dropouts.modules):
        module.register_forward_hook(lambda _, given, dropped, number=number: count(number, given[0], dropped))
    torch.manual_seed(0)
    rates = torch.rand(4, 7) * 0.5
    views = batch(encoder)
    with dropouts.at(rates), torch.no_grad():
        for _ in range(40):
            encoder(**views)
    expected = rates.T
    assert (counts > 500).all()
    assert ((zeros / counts - expected).abs() <= 4 * (expected * (1 - expected) / counts).sqrt()).all()


def test_attention_that_drops_nothing_is_torchs_own() -> None:
    class Attention(nn.Module):
        dropout = nn.Identity()

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind(0)  # (n, heads, L, d)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, ..., 4:] = False
    output, probabilities = ALL_ATTENTION_FUNCTIONS["sampled_dropout"](Attention(), query, key, value, mask)
    expected = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    assert probabilities[0, ..., 4:].eq(0).all()


def test_after_a_pass_the_rates_are_gone_even_when_it_fails(tiny_bert: Path) -> None:
    dropouts = Dropouts.install(load(tiny_bert).backbone)
    with pytest.raises(RuntimeError, match="in the middle"), dropouts.at(torch.zeros(2, 7)):
        raise RuntimeError("in the middle")
    assert all(module.rates is None for module in dropouts.modules)


def test_nothing_of_it_is_served_or_saved(folder: Path, tmp_path: Path) -> None:
    plain, encoder = load(folder), load(folder)
    keys = list(encoder.state_dict())
    dropouts = Dropouts.install(encoder.backbone)
    assert list(encoder.state_dict()) == keys
    with dropouts.at(torch.full((4, 7), 0.5)):
        assert (encoder.train().embed(TEXTS) == plain.train().embed(TEXTS)).all()
    for model, name in ((plain, "plain"), (encoder, "sampled")):
        model.save(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        if file.suffix != ".safetensors":
            assert file.read_bytes() == (tmp_path / "sampled" / file.name).read_bytes(), file.name
    weights = load_file(tmp_path / "sampled" / "model.safetensors")
    assert weights.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    again = load(tmp_path / "sampled").backbone
    assert not any(isinstance(module, SampledDropout) for module in again.modules())
    assert again.config._attn_implementation == "sdpa"


def test_other_backbones_work_or_say_why_not() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.randint(5, 50, (3, 6))
    distilbert = DistilBertModel(DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32))
    for backbone in (distilbert, MPNetModel(MPNetConfig(**sizes, intermediate_size=32))):
        expected = backbone.eval()(input_ids=ids).last_hidden_state
        dropouts = Dropouts.install(backbone)
        with dropouts.at(torch.zeros(3, len(dropouts))):
            found = backbone.train()(input_ids=ids).last_hidden_state
        torch.testing.assert_close(found, expected)
        with dropouts.at(torch.full((3, len(dropouts)), 0.5)):
            assert not torch.allclose(backbone(input_ids=ids).last_hidden_state, expected)
    albert = AlbertModel(AlbertConfig(**sizes, embedding_size=16, intermediate_size=32))
    with pytest.raises(EncoderError, match=r"'albert' model is not supported; write attention_dropout = false"):
        Dropouts.install(albert)
    assert not any(isinstance(module, SampledDropout) for module in albert.modules())
