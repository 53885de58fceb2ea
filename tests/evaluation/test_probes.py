"""The suite `probes`: what each rule makes of a sentence and where it holds back, the figures, and own files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from scipy.stats import norm
from tiny_bundle import write_bundle

from cloze.command import run
from cloze.training.errors import CorpusError
from cloze.training.evaluate import main
from cloze.training.evaluation import rewriting
from cloze.training.evaluation.suites.probes import PROBES, REWRITTEN, ProbeTask, make_probes, tasks
from cloze.training.evaluation.task import Subject

SAID = {
    rewriting.moved: {
        "In 2013, the band moved to Leeds.": "The band moved to Leeds in 2013.",
        "The band moved to Leeds in 2013.": "In 2013, the band moved to Leeds.",
    },
    rewriting.synonym: {
        "He bought an automobile.": "He bought a car.",
        "It is located near a huge lake.": "It is situated near a huge lake.",
    },
    rewriting.contraction: {"They did not stay there.": "They didn't stay there."},
    rewriting.other_form: {
        "Two dogs run over the field.": "2 dogs run over the field.",
        "It has 12 rooms and a hall.": "It has twelve rooms and a hall.",
    },
}
HELD_BACK = {
    rewriting.moved: ["In 2013, he moved because it rained.", "He moved to Leeds."],
    rewriting.synonym: ["The first began-again movement ended.", "He was due to leave."],
    rewriting.contraction: ["They stayed there."],
    rewriting.other_form: ["On 12 June he left for good.", "It has 112 rooms and a hall.", "More than 5 dogs run."],
    rewriting.negation: ["In 2013, he was not paid in full.", "In 2013, he was there when it was cold."],
    rewriting.swapped_roles: ["In 2013, Anna married John.", "A man is looking at a man in the park."],
    rewriting.other_name: ["In 2013, the band moved to Leeds."],
    rewriting.other_order: ["They drove from May to June.", "He ran home."],
    rewriting.antonym: ["He ran home."],
}
CHANGED = {
    rewriting.negation: ("In 2013, it was sold.", "It was sold in 2013.", "In 2013, it was not sold."),
    rewriting.swapped_roles: (
        "A man is looking at an old dog in the park.",
        "In the park, a man is looking at an old dog.",
        "An old dog is looking at a man in the park.",
    ),
    rewriting.other_order: (
        "It runs from Leeds to York.", "It runs to York from Leeds.", "It runs from York to Leeds.",
    ),
    rewriting.antonym: ("They often met there.", "They frequently met there.", "They rarely met there."),
}  # fmt: skip


def ids(rule: Callable[..., object]) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", SAID, ids=ids)
def test_what_a_rule_makes_of_a_sentence(rule: rewriting.Rule) -> None:
    for sentence, expected in SAID[rule].items():
        assert rule(sentence, default_rng(0)) == expected


@pytest.mark.parametrize("rule", CHANGED, ids=ids)
def test_what_is_said_changes_beside_a_text_that_says_the_same(
    rule: Callable[[str, Generator], rewriting.Rewritten | None],
) -> None:
    sentence, near, far = CHANGED[rule]
    assert rule(sentence, default_rng(0)) == (near, far)


@pytest.mark.parametrize("rule", HELD_BACK, ids=ids)
def test_a_rule_holds_back_where_it_would_be_wrong(rule: Callable[[str, Generator], object]) -> None:
    for sentence in HELD_BACK[rule]:
        assert all(rule(sentence, default_rng(seed)) is None for seed in range(20)), sentence


def test_a_number_and_a_name_become_others_of_their_kind() -> None:
    for seed in range(20):
        near, far = rewriting.other_number("Two dogs run over the field.", default_rng(seed)) or ("", "")
        assert near == "2 dogs run over the field."
        assert far.endswith(" dogs run over the field.")
        assert far.split()[0].lower() in rewriting.NUMBERS[1:]
        near, far = rewriting.other_name("In 2013, she moved to Berlin.", default_rng(seed)) or ("", "")
        assert near == "She moved to Berlin in 2013."
        [cities] = [names for names in rewriting.PLACES if "Berlin" in names]
        assert far.removeprefix("In 2013, she moved to ").removesuffix(".") in set(cities) - {"Berlin"}


def test_typing_errors_are_in_every_third_long_word_and_change_it_by_one_letter() -> None:
    sentence = "the small green frogs jumped over seven wooden fences again today"
    found = str(rewriting.misspelt(sentence, default_rng(0))).split()
    changed = [place for place, (new, old) in enumerate(zip(found, sentence.split(), strict=True)) if new != old]
    assert set(changed) <= {1, 4, 7, 10}
    assert len(changed) >= 3
    for place in changed:
        assert abs(len(found[place]) - len(sentence.split()[place])) <= 1


def corpus() -> list[str]:
    cities = ["York", "Leeds", "Bath", "Hull", "Dover", "Exeter", "Derby", "Truro"]
    return [
        f"{number.capitalize()} dogs often ran from {start} to {end}."
        for number in rewriting.NUMBERS[:8]
        for start in cities
        for end in cities
        if start != end
    ]


def test_probes_are_the_same_in_any_order_and_no_more_than_asked() -> None:
    made = make_probes(corpus(), items=40)
    assert make_probes(reversed(corpus()), items=40) == made
    assert list(made) == list(PROBES)
    found = {name: len(items) for name, items in made.items() if items}
    assert found == {"numbers": 40, "antonyms": 40, "word order": 40}
    for name in set(REWRITTEN):
        for anchor, near, far in made[name]:
            assert len({anchor, near, far}) == 3


def test_the_other_text_beside_a_paraphrase_is_its_nearest_neighbour_by_words() -> None:
    sentences = [
        "He read numerous papers on three islands.",
        "He read numerous papers on old islands.",
        "A ship sank near the old coast.",
    ]
    [(anchor, near, far)] = make_probes(sentences)["paraphrase"]
    assert anchor == sentences[0]
    assert near == "He read many papers on 3 islands."
    assert far == sentences[1]


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Angles in degrees."""
    angles = np.radians([float(text) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_figures_are_those_of_a_loop() -> None:
    rows = [("0", "10", "60"), ("0", "70", "20"), ("0", "30", "-30"), ("0", "1", "90")] * 25
    accuracy, far = ProbeTask("negation", rows).run(Subject.of("angles", embed))
    right = 0.0
    for anchor, near, other in rows:
        cosines = [np.cos(np.radians(float(text) - float(anchor))) for text in (near, other)]
        right += 1.0 if cosines[0] > cosines[1] + 1e-6 else 0.5 if abs(cosines[0] - cosines[1]) < 1e-6 else 0.0
    assert accuracy.value == pytest.approx(100 * right / len(rows)) == pytest.approx(62.5)
    assert far.value == pytest.approx(np.mean(np.cos(np.radians([60, 20, 30, 90]))), abs=1e-6)
    share, count, z = round(right) / len(rows), len(rows), norm.ppf(0.975)
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    assert accuracy.details["interval"] == pytest.approx([100 * (centre - half), 100 * (centre + half)], abs=0.01)


def test_own_sentences_make_probes_and_small_ones_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("\n".join(corpus()))
    found = tasks(None, [own])
    assert {"numbers", "antonyms", "word order"} <= {task.name for task in found}
    assert "skipped the probe negation: these sentences give 0 items" in capsys.readouterr().err
    assert tasks(None, []) == []
    own.write_text("too short.\n")
    with pytest.raises(CorpusError, match="no probe has 30 items; give more English sentences, one per line"):
        tasks(None, [own])


def test_the_command_scores_them_and_the_card_says_what_is_not_understood(tmp_path: Path) -> None:
    own, bundle = tmp_path / "own.txt", write_bundle(tmp_path / "tiny")
    own.write_text("\n".join(corpus()))
    words = [str(bundle), "--suite", "probes", "--probes", str(own), "--cache", str(tmp_path / "cache")]
    assert run(lambda: main([*words, "--card", "--json", str(tmp_path / "out.json")])) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    [numbers, far] = [each for each in results if each["task"] == "numbers"]
    assert numbers["counts"] == {"items": 300}
    low, high = numbers["details"]["interval"]
    assert low <= numbers["value"] <= high
    card = (bundle / "README.md").read_text()
    assert "What it does not understand: how often a text that says the same is nearer" in card
    assert f"| numbers | {numbers['value']:.1f}, {far['value']:.2f} |" in card
