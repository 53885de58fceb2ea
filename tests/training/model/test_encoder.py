import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from cloze.encoding.text import TextEncoder, token_batches
from cloze.training.errors import EncoderError
from cloze.training.model.encoder import SentenceEncoder

BERT = 'This sentence of "[X]" means [MASK].'
ROBERTA = "This sentence : ' [X] ' means [MASK]."
TEXTS = ["Two dogs run.", "", "A man is playing the guitar on a stage in the city.", "rain [MASK] [SEP] </s> <mask>"]


@pytest.fixture(params=["bert", "roberta"])
def encoder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> SentenceEncoder:
    folder, template = {"bert": (tiny_bert, BERT), "roberta": (tiny_roberta, ROBERTA)}[request.param]
    return SentenceEncoder.load(str(folder), template=template, pooling="mask", denoising=True).eval()


def ids_with(text_encoder: TextEncoder, inner: list[int]) -> torch.Tensor:
    return torch.tensor([text_encoder.prefix_ids + inner + text_encoder.suffix_ids])


@torch.no_grad()
def test_bias_equals_the_template_around_masked_out_tokens(encoder: SentenceEncoder) -> None:
    text_encoder = encoder.text_encoder
    prefix = len(text_encoder.prefix_ids)
    for n in range(text_encoder.text_tokens + 1):
        ids = ids_with(text_encoder, [7] * n)
        attention = torch.ones_like(ids)
        attention[:, prefix : prefix + n] = 0
        # absolute positions, as they stand in a sequence of this length
        positions = torch.arange(ids.shape[1]).unsqueeze(0) + (
            2 if "roberta" in str(type(encoder.backbone)).lower() else 0
        )
        expected = encoder.hidden(ids, attention, positions)[:, text_encoder.mask_index]
        torch.testing.assert_close(
            encoder.template_bias(torch.tensor([n]), encoder.text_encoder), expected, atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_empty_text_is_zero_when_denoised(encoder: SentenceEncoder) -> None:
    input_ids, attention_mask = map(torch.from_numpy, encoder.text_encoder.batch([""]))
    assert torch.equal(encoder(input_ids, attention_mask), torch.zeros(1, 32))


def test_positions_after_the_text_move_by_its_length(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    hidden = encoder.hidden
    monkeypatch.setattr(encoder, "hidden", lambda *given: (seen.append(given[2]), hidden(*given))[1])
    encoder.template_bias(torch.tensor([5, 0, 5]), encoder.text_encoder)
    text_encoder = encoder.text_encoder
    prefix, first = len(text_encoder.prefix_ids), 2 if "roberta" in str(type(encoder.backbone)).lower() else 0
    total = text_encoder.template_tokens
    assert seen[0].tolist() == [  # one row a distinct length
        [first + place for place in range(total)],
        [first + place + (5 if place >= prefix else 0) for place in range(total)],
    ]


def test_bias_is_independent_of_the_batch_and_carries_gradient(encoder: SentenceEncoder) -> None:
    together = encoder.template_bias(torch.tensor([3, 1, 9]), encoder.text_encoder)
    alone = encoder.template_bias(torch.tensor([9]), encoder.text_encoder)
    torch.testing.assert_close(together[2:], alone)
    alone[0, 0].backward()  # not the sum: LayerNorm holds that constant
    gradient = next(encoder.backbone.encoder.layer[0].parameters()).grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("pooling", "template"), [("mask", BERT), ("mask", "[MASK] is [X]"), ("cls", "[X]"), ("mean", "[X]")]
)
def test_poolings_equal_a_loop_over_unpadded_texts(tiny_bert: Path, pooling: str, template: str) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template=template, pooling=pooling)
    vectors = encoder.embed(TEXTS)
    encoder.eval()
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([encoder.text_encoder.encode([text])[0].ids])
        with torch.no_grad():
            hidden = encoder.backbone(input_ids=ids).last_hidden_state[0]
        mask = encoder.tokenizer.mask_token_id
        expected = {
            "cls": hidden[0],
            "mean": hidden.mean(0),
            "mask": hidden[ids[0].tolist().index(mask)] if mask in ids else None,
        }
        np.testing.assert_allclose(vector, expected[pooling].numpy(), atol=1e-5)


def test_what_is_saved_is_what_is_loaded(encoder: SentenceEncoder, tmp_path: Path) -> None:
    encoder.save(tmp_path)
    again = SentenceEncoder.load(str(tmp_path))
    assert again.config == encoder.config
    np.testing.assert_array_equal(again.embed(TEXTS), encoder.embed(TEXTS))


def test_embed_leaves_the_training_mode_as_it_was(encoder: SentenceEncoder) -> None:
    encoder.train()
    first = encoder.embed(TEXTS)
    assert encoder.training
    np.testing.assert_array_equal(first, encoder.embed(TEXTS))


def test_token_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(3, 40, 500).tolist()
    batches = list(token_batches(lengths, 128))
    assert sorted(row for rows in batches for row in rows) == list(range(500))
    padded = [len(rows) * max(lengths[row] for row in rows) for rows in batches]
    assert max(padded) <= 128
    assert sum(padded) < 1.05 * sum(lengths)
    assert list(token_batches([500, 3], 128)) == [[1], [0]]  # one that is too long runs alone
    assert list(token_batches([3] * 5, 128, batch_rows=2)) == [[0, 1], [2, 3], [4]]
    assert list(token_batches([], 42)) == []


def test_a_model_that_is_not_there_speaks() -> None:
    with pytest.raises(
        EncoderError,
        match=r"^nowhere/at-all is not complete in the local cache .*, and HF_HUB_OFFLINE is set; unset it",
    ):
        SentenceEncoder.load("nowhere/at-all", template="[X]", pooling="cls")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"torn", "cannot be loaded as an encoder"),
        ("tokenizer.json", b"{}", "cannot be loaded as an encoder"),
        ("embedding_config.json", b"{", "cannot be loaded as an encoder"),
        ("embedding_config.json", b'{"template": "[X]", "pooling": "eos"}', "pooling is 'eos'"),
        ("tokenizer.json", None, "has a tokenizer without words; copy the parent's"),
    ],
)
def test_a_folder_of_which_a_file_is_torn_or_missing_speaks(
    masked_bert: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = shutil.copytree(masked_bert, tmp_path / "torn")
    if content is None:
        (folder / name).unlink()
        (folder / "tokenizer_config.json").unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(EncoderError, match=message):
        SentenceEncoder.load(str(folder))


@pytest.mark.parametrize("source", ["/no/such/folder", "./folder", "a/b/c", __file__])
def test_what_can_be_no_hub_name_is_not_asked_of_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(EncoderError, match="cannot be loaded as an encoder: it is not a folder; give a folder"):
        SentenceEncoder.load(source, template="[X]", pooling="cls")


def test_a_model_without_a_reading_asks_for_one(tiny_bert: Path) -> None:
    with pytest.raises(EncoderError, match="--template and --pooling"):
        SentenceEncoder.load(str(tiny_bert))


def test_more_tokens_than_positions_are_refused(tiny_roberta: Path) -> None:
    with pytest.raises(EncoderError, match=r"max_tokens is 65.*positions for 64"):
        SentenceEncoder.load(str(tiny_roberta), template="[X]", pooling="cls", max_tokens=65)


def test_missing_weights_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_bert, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderError, match=r"lacks the weights encoder\.layer\.1\.output\.dense\.weight"):
        SentenceEncoder.load(str(folder), template="[X]", pooling="cls")


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}, "has a tokenizer without cls_token"),
        (
            "t5",
            {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
            "is a T5Model, not an encoder",
        ),
    ],
)
def test_a_model_that_is_no_encoder_speaks(
    kind: str, config: dict[str, int], message: str, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=200, **config)).save_pretrained(folder)
    if kind == "gpt2":
        content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        content = {key: value for key, value in content.items() if key not in ("cls_token", "sep_token")}
        (folder / "tokenizer_config.json").write_text(json.dumps(content | {"tokenizer_class": "TokenizersBackend"}))
    with pytest.raises(EncoderError, match=message):
        SentenceEncoder.load(str(folder), template="[X]", pooling="mean")
