"""Templates: what is accepted, what is refused, and what the message advises."""

import pytest

from cloze.encoding.errors import TemplateError
from cloze.encoding.template import Template


def test_splits_around_the_text() -> None:
    template = Template.parse('This sentence of "[X]" means [MASK].', "mask")
    assert (template.prefix, template.suffix) == ('This sentence of "', '" means [MASK].')


def test_the_plain_template_is_empty_on_both_sides() -> None:
    assert Template.parse("[X]", "mean") == Template("", "")


def test_keeps_its_source() -> None:
    for source in ('"[X]" is [MASK].', "[MASK] : [X]"):
        assert str(Template.parse(source, "mask")) == source


def test_drops_outer_blanks_only() -> None:
    assert Template.parse("  say [X] now ", "cls") == Template("say ", " now")


def test_refuses(subtests: pytest.Subtests) -> None:
    for source, pooling, advice in [
        ("no text [MASK]", "mask", r"has \[X\] 0 times"),
        ("[X] and [X] [MASK]", "mask", r"has \[X\] 2 times"),
        ("[X] means", "mask", r"write \[MASK\] exactly once"),
        ("[X] [MASK] [MASK]", "mask", r"has \[MASK\] 2 times"),
        ("[X] [MASK]", "mean", r"remove \[MASK\], or choose the pooling 'mask'"),
        ("[X] <mask>", "mask", r"write \[MASK\] instead of <mask>"),
    ]:
        with subtests.test(source=source), pytest.raises(TemplateError, match=advice):
            Template.parse(source, pooling)
