"""Distillation's texts and targets: what a sentence is trained as, and what the teacher says of it."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recipes import load_recipe
from test_objectives import build

from training.errors import RecipeError
from training.methods.distill import DistillRecipe
from training.methods.parts.student_texts import QUERY_WORDS, query_of, search_text, windows, words_only
from training.model.encoder import SentenceEncoder
from training.recipes.files import choose_preset, read_toml, validate

CARD = Path(__file__).parents[2] / "models" / "cloze-mini" / "README.md"
TEMPLATE = 'The "[X]" is [MASK].'
RUN = [f"Sentence {number} of the story has, one might say, some ten words." for number in range(8)]


def test_a_sentence_becomes_a_passage_a_query_or_stays() -> None:
    sentences = [f"No. {number}: a sentence that has more words than any query is made of." for number in range(8000)]
    runs = [sentences[first : first + 8] for first in range(0, len(sentences), 8)]
    kinds: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for run in runs:
        for place, sentence in enumerate(run):
            text = search_text(run, place, 0.35, 0.25)
            assert text == search_text(run, place, 0.35, 0.25)
            count = text.count("No. ")
            if text == sentence:
                kinds["sentence"] += 1
            elif count > 1:
                kinds["passage"] += 1
                lengths[count] += 1
                assert text in " ".join(run)
            else:
                kinds["query"] += 1
                assert 1 <= len(text.split()) <= QUERY_WORDS + 2  # and two words of a question
    assert kinds["passage"] / 8000 == pytest.approx(0.35, abs=0.02)
    assert kinds["query"] / 8000 == pytest.approx(0.25, abs=0.02)
    assert set(lengths) == set(range(2, 9))


def test_a_query_has_no_blanks_around_it() -> None:
    queries = {query_of("so ( he said ) . ( and then )", random.Random(seed)) for seed in range(400)}
    assert len(queries) > 20
    assert [query for query in queries if query != query.strip()] == []


def test_without_shares_every_sentence_stays() -> None:
    assert [search_text(RUN, place, 0, 0) for place in range(8)] == RUN


def test_a_run_of_one_has_no_other_to_join() -> None:
    assert search_text(["Alone."], 0, 1, 0) == "Alone."


def test_windows_are_of_like_size_and_lose_nothing() -> None:
    words = [str(number) for number in range(170)]
    parts = windows(" ".join(words), 80)
    assert [len(part.split()) for part in parts] == [57, 57, 56]
    assert " ".join(parts).split() == words
    assert windows("a b", 80) == ["a b"]
    assert windows("", 80) == [""]


@pytest.mark.parametrize("views", [["text"], ["words"], ["words", "words-windows", "text-windows"]])
def test_the_teachers_vector_is_the_sum_over_its_views(views: list[str], tiny_bert: Path) -> None:
    keys = {"teacher_views": views, "teacher_window": ["5"], "passage_share": ["0"], "query_share": ["0"]}
    objective = build("distill", tiny_bert, **keys)
    rows = [("Two dogs run.",), ("A man, on a stage, is playing the guitar in the old city.",), ("?!",), ("Rain.",)]
    teacher = objective._teacher[0]

    def vector(text: str) -> torch.Tensor:
        return F.normalize(torch.from_numpy(teacher.embed([text])[0]), dim=0)

    found = objective._targets(objective.views(rows)["teacher"], torch.zeros(len(rows), 1))
    for (text,), target in zip(rows, found, strict=True):
        expected = torch.zeros(32)
        if "text" in views:
            expected += vector(text)
        if "words" in views:
            expected += vector(f"{words_only(text)}.")
        parts = windows(text, 5)
        if "words-windows" in views and len(parts) > 1:
            expected += sum(vector(f"{words_only(part)}.") for part in parts) / len(parts)
            expected += sum(vector(part) for part in parts) / len(parts)
        torch.testing.assert_close(target, expected, atol=1e-5, rtol=0)


def test_co_teachers_add_their_vectors_to_those_of_short_texts(tiny_bert: Path, tmp_path: Path) -> None:
    students = []
    for number in range(2):
        torch.manual_seed(number)
        student = SentenceEncoder.load(str(tiny_bert), template=TEMPLATE, pooling="mask")
        for weight in student.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        student.save(tmp_path / str(number))
        students.append(student.eval())
    keys = {"passage_share": ["0"], "query_share": ["0"], "template": [TEMPLATE], "pooling": ["mask"]}
    keys |= {"co_teachers": [str(tmp_path / "0"), str(tmp_path / "1")], "co_teacher_tokens": ["20"]}
    objective = build("distill", tiny_bert, **keys)
    texts = ["Rain.", "A man is playing the guitar on a stage in the old city while two dogs run over the field."]
    views = objective.views([(text,) for text in texts])
    assert [int(length) > 20 for length in views["text"]["attention_mask"].sum(1)] == [False, True]
    short = sum(F.normalize(torch.from_numpy(student.embed(texts[:1])[0]), dim=0) for student in students)
    expected = torch.stack([short, torch.zeros(32)])
    torch.testing.assert_close(objective._co_targets(views["text"], torch.zeros(2, 32)), expected, atol=1e-5, rtol=0)
    assert not any("co_teacher" in name for name in objective.state_dict())

    alone = build("distill", tiny_bert, **keys | {"co_teachers": []})
    assert alone.views([("Rain.",)]).keys() == {"student", "teacher"}
    targets = objective._targets(views["teacher"], torch.zeros(2, 1)) + expected
    vectors = objective._encode(objective.encoder.eval(), objective.pooling, views["student"])
    distance = 1 - F.cosine_similarity(vectors, targets).mean()
    torch.testing.assert_close(objective(**views)["cosine_distance"], distance, atol=1e-5, rtol=0)


def test_a_co_teacher_of_another_template_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    SentenceEncoder.load(str(tiny_bert), template="[X] is [MASK].", pooling="mask").save(tmp_path / "other")
    with pytest.raises(RecipeError, match=r"has the template '\[X\] is \[MASK\]\.' with mask pooling, and the student"):
        build("distill", tiny_bert, co_teachers=[str(tmp_path / "other")])


def test_a_co_teacher_of_another_parent_is_refused(tiny_bert: Path, tiny_roberta: Path, tmp_path: Path) -> None:
    SentenceEncoder.load(str(tiny_roberta), template=TEMPLATE, pooling="mask").save(tmp_path / "other")
    keys = {"template": [TEMPLATE], "pooling": ["mask"], "co_teachers": [str(tmp_path / "other")]}
    with pytest.raises(RecipeError, match="differs in dimension or vocabulary from the encoder"):
        build("distill", tiny_bert, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"passage_share": ["0.6"], "query_share": ["0.5"]}, "together at most 1"),
        ({"passage_share": ["0.5"], "neighbours": ["1"]}, "a passage is made of a run of neighbours"),
        ({"passage_share": ["0.5"], "neighbours": ["5"]}, r"as a multiple of it \(found 5, 64\)"),
        ({"teacher_views": ["text-windows"]}, "add text or words"),
        ({"teacher_views": []}, "teacher_views"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, list[str]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("distill", {"encoder": ["e"], "teacher": ["t"], "corpus": ["c.txt"], **keys})


@pytest.mark.parametrize(("number", "preset"), [(1, "sentences"), (2, None)])
def test_the_recipes_on_the_default_models_card_load_and_are_the_shipped_ones(
    number: int, preset: str | None, tmp_path: Path
) -> None:
    blocks = re.findall(r"(?s)```toml\n(.*?)```", CARD.read_text(encoding="utf-8"))
    assert len(blocks) == 2
    file = tmp_path / f"recipe-{number}.toml"
    file.write_text(blocks[number - 1], encoding="utf-8")
    printed = validate(DistillRecipe, read_toml(str(file)), str(file)).model_dump(mode="json")
    shipped = choose_preset(read_toml("distill"), preset, "distill")
    places = {"encoder", "teacher"}  # on the card: names without their folders
    assert {key: printed[key] for key in shipped.keys() - places} == {
        key: shipped[key] for key in shipped.keys() - places
    }
    assert printed["co_teachers"] == ([] if preset else ["sentences"])
