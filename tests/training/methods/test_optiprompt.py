"""A continuous template: equal to the manual one at first, placed by position, all of the encoder that learns."""

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import load_recipe

from cloze.encoding.errors import TemplateError
from cloze.training.errors import EncoderError, RecipeError
from cloze.training.methods import objective_of
from cloze.training.methods.optiprompt import OptiPrompt
from cloze.training.model.continuous_template import CONTINUOUS_FILE, ContinuousTemplate
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, save_masked_lm
from cloze.training.model.views import view

BERT = 'This sentence : "[X]" means [MASK].'
TEMPLATES = {"bert": BERT, "roberta": "This sentence : ' [X] ' means [MASK].", "before": "A [MASK] is what [X] says."}
TEXTS = ["Two dogs run.", "", 'this sentence : "a man" means.', "A man is playing the guitar on a stage in the city."]
ROWS = [(text,) for text in TEXTS]


@pytest.fixture(params=TEMPLATES)
def encoder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_roberta: Path) -> SentenceEncoder:
    folder = tiny_roberta if request.param == "roberta" else tiny_bert
    return SentenceEncoder.load(str(folder), template=TEMPLATES[request.param], pooling="mask").eval()


def make_continuous(encoder: SentenceEncoder, change: float = 0.0) -> ContinuousTemplate:
    encoder.continuous = ContinuousTemplate(encoder.text_encoder, encoder.backbone.get_input_embeddings())
    torch.manual_seed(1)
    with torch.no_grad():
        encoder.continuous.vectors += change * torch.randn_like(encoder.continuous.vectors)
    return encoder.continuous


def build(folder: Path, **words: list[str]) -> OptiPrompt:
    words = {"encoder": [str(folder)], "corpus": ["unused.txt"], "batch_size": ["4"], **words}
    recipe = load_recipe("optiprompt", words)
    torch.manual_seed(0)
    encoder = SentenceEncoder.load(recipe.encoder, template=recipe.template, pooling=recipe.pooling)
    return objective_of("optiprompt")(encoder, recipe)


@pytest.mark.parametrize("denoising", [False, True])
def test_it_begins_as_the_manual_template(encoder: SentenceEncoder, denoising: bool) -> None:
    encoder.reconfigure(encoder.config.model_copy(update={"denoising": denoising}))
    manual = encoder.embed(TEXTS)
    make_continuous(encoder)
    np.testing.assert_allclose(encoder.embed(TEXTS, batch_tokens=10**9), manual, atol=1e-6)


def test_a_vector_for_each_token_but_the_special_ones(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="This is [X] means [MASK] .", pooling="mask")
    tokens = len(encoder.text_encoder.prefix_ids + encoder.text_encoder.suffix_ids)
    assert make_continuous(encoder).vectors.shape == (tokens - 3, 32)


def test_vectors_stand_at_the_templates_places_and_nowhere_else(encoder: SentenceEncoder) -> None:
    """A loop over unpadded texts, against the padded batch; one text has the template's own words."""
    continuous = make_continuous(encoder, 1.0)
    text_encoder, embeddings = encoder.text_encoder, encoder.backbone.get_input_embeddings()
    input_ids, attention_mask = map(torch.from_numpy, text_encoder.batch(TEXTS))
    words = encoder.words(input_ids, attention_mask, encoder.text_encoder)
    for row, text in enumerate(TEXTS):
        [sequence] = text_encoder.encode([text])
        prefix, end = len(text_encoder.prefix_ids), len(sequence.ids) - len(text_encoder.suffix_ids)
        special = {0, len(sequence.ids) - 1, sequence.ids.index(text_encoder.special.mask)}
        vectors = iter(continuous.vectors)
        for place, token in enumerate(sequence.ids):
            of_template = not prefix <= place < end and place not in special
            expected = next(vectors) if of_template else embeddings(torch.tensor(token))
            assert torch.equal(words[row, place], expected)
    padding = attention_mask == 0
    assert torch.equal(words[padding], embeddings(input_ids[padding]))


def test_another_prompt_keeps_its_words(encoder: SentenceEncoder) -> None:
    other = encoder.make_text_encoder("Say [X] : [MASK]", 32)
    before = encoder.vectors(view(other, TEXTS), other)
    make_continuous(encoder, 1.0)
    assert torch.equal(encoder.vectors(view(other, TEXTS), other), before)


def test_the_empty_text_is_zero_when_denoised(encoder: SentenceEncoder) -> None:
    make_continuous(encoder, 1.0)
    encoder.reconfigure(encoder.config.model_copy(update={"denoising": True}))
    assert not encoder.embed([""]).any()
    assert encoder.embed(["rain"]).any()


def test_what_is_saved_is_what_is_loaded(encoder: SentenceEncoder, tmp_path: Path) -> None:
    manual = encoder.embed(TEXTS)
    make_continuous(encoder, 1.0)
    encoder.save(tmp_path)
    again = SentenceEncoder.load(str(tmp_path))
    np.testing.assert_array_equal(again.embed(TEXTS), encoder.embed(TEXTS))
    assert not np.allclose(again.embed(TEXTS), manual, atol=0.01)


def test_another_template_than_the_trained_one_is_refused(encoder: SentenceEncoder, tmp_path: Path) -> None:
    make_continuous(encoder)
    encoder.save(tmp_path)
    with pytest.raises(TemplateError, match=r"trained vectors for the words of .* not of '\[X\] is \[MASK\]'"):
        SentenceEncoder.load(str(tmp_path), template="[X] is [MASK]")
    (tmp_path / CONTINUOUS_FILE).write_bytes(b"torn")
    with pytest.raises(EncoderError, match=r"template\.safetensors does not fit this encoder"):
        SentenceEncoder.load(str(tmp_path))


def test_only_the_vectors_and_the_head_learn(masked_bert: Path) -> None:
    objective = build(masked_bert).train()
    before = {key: weight.clone() for key, weight in objective.named_parameters()}
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1)
    objective(**objective.views(ROWS))["loss"].backward()
    optimiser.step()
    changed = {key for key, weight in objective.named_parameters() if not torch.equal(weight, before[key])}
    assert changed == {"encoder.continuous.vectors", *(f"head.{key}" for key in objective.head.state_dict())}
    assert (objective.encoder.continuous.vectors != before["encoder.continuous.vectors"]).any(dim=1).all()


def test_the_papers_template_has_seven_vectors_to_learn(masked_bert: Path) -> None:
    objective = build(masked_bert)
    assert objective.recipe.template == BERT
    learning = {key: weight for key, weight in objective.named_parameters() if weight.requires_grad}
    head = sum(weight.numel() for weight in objective.head.parameters())
    assert sum(weight.numel() for weight in learning.values()) - head == 7 * 32
    ids = objective.encoder.text_encoder
    manual = objective.encoder.tokenizer.convert_tokens_to_ids(["this", "sentence", ":", '"', '"', "means", "."])
    assert [token for token in ids.prefix_ids + ids.suffix_ids if token not in special(objective)] == manual
    words = objective.encoder.backbone.get_input_embeddings().weight
    assert torch.equal(learning["encoder.continuous.vectors"], words[manual])


def special(objective: OptiPrompt) -> set[int]:
    return set(objective.encoder.tokenizer.all_special_ids)


def test_the_head_begins_as_the_masked_words_transform(masked_bert: Path) -> None:
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(build(masked_bert).head(hidden), MaskedHead.load(str(masked_bert)).transform(hidden))


def test_an_encoder_without_a_masked_word_head_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(EncoderError, match=r"has no masked-word head.*cloze pretrain"):
        build(tiny_bert)


def test_a_template_without_words_is_refused(masked_bert: Path) -> None:
    with pytest.raises(TemplateError, match="has no words to make continuous"):
        build(masked_bert, template=["[X] [MASK]"])


def test_training_goes_on_from_trained_vectors(masked_bert: Path, tmp_path: Path) -> None:
    objective = build(masked_bert)
    with torch.no_grad():
        objective.encoder.continuous.vectors += 1
    objective.save(tmp_path)
    save_masked_lm(objective.encoder.backbone, MaskedHead.load(str(masked_bert)), tmp_path)
    assert torch.equal(build(tmp_path).encoder.continuous.vectors, objective.encoder.continuous.vectors)


def test_named_templates_are_left_out(masked_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A graph has the vectors at the places of one template, and would put them into the words of another."""
    named = SentenceEncoder.load(str(masked_bert), template="[X] means [MASK].", pooling="mask")
    named.reconfigure(named.config.model_copy(update={"templates": {"query": 'The question "[X]" means [MASK].'}}))
    named.save(tmp_path)
    save_masked_lm(named.backbone, MaskedHead.load(str(masked_bert)), tmp_path)
    objective = build(tmp_path)
    assert objective.encoder.config.templates == {}
    assert "skipped the templates for query, because trained vectors replace" in capsys.readouterr().err
    words = {"corpus": ["unused.csv"], "columns": ["a", "b"], "query_template": ["ask [X] [MASK]"]}
    reading = {"template": ["[X] means [MASK]."], "pooling": ["mask"]}
    recipe = load_recipe("simcse-supervised", {"encoder": [str(masked_bert)], **words, **reading})
    with pytest.raises(RecipeError, match="so it cannot have other templates, for query; omit them, or choose another"):
        objective_of("simcse")(objective.encoder, recipe)
