"""Rules that rewrite an English sentence. Some keep its meaning, others change it. The suite `probes` uses them.

A rule takes a sentence and a random generator, and returns None if it does not apply. The rules look at words, not at
grammar, so they accept few sentences: those of `is_plain`, with a single clause if a phrase is moved or negated. The
word lists are short and hand-written, without words whose sense depends on the sentence.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from numpy.random import Generator

Rule: TypeAlias = Callable[[str, Generator], str | None]
Rewritten: TypeAlias = tuple[str, str]
"""A text of the same meaning, and one of another meaning."""

WORDS: Final = (5, 30)  # of a sentence
MARKS: Final = re.compile(r"""["“”«»()\[\]:;!?/…—–&*]|[.](?!$)|['’](?!s\b|t\b)|\s-|-\s""")

# Word or phrase -> a synonym. Both fit wherever the first one occurs in lower case.
SYNONYMS: Final = {
    "approximately": "about",
    "located": "situated",
    "numerous": "many",
    "purchased": "bought",
    "constructed": "built",
    "mainly": "mostly",
    "primarily": "mainly",
    "frequently": "often",
    "currently": "at present",
    "nearly": "almost",
    "due to the": "because of the",
    "attempted to": "tried to",
    "children": "kids",
    "film": "movie",
    "physician": "doctor",
    "automobile": "car",
    "entire": "whole",
    "initially": "at first",
    "subsequently": "afterwards",
    "prior to": "before",
    "began": "started",
    "largest": "biggest",
    "large": "big",
    "together with": "along with",
    "throughout": "all through",
    "obtained": "got",
    "assisted": "helped",
    "residents": "inhabitants",
    "bicycle": "bike",
    "photograph": "picture",
    "couch": "sofa",
    "sidewalk": "pavement",
}

# Word or phrase -> a synonym, and the opposite.
ANTONYMS: Final = {
    "large": ("big", "small"),
    "largest": ("biggest", "smallest"),
    "huge": ("enormous", "tiny"),
    "rapidly": ("quickly", "slowly"),
    "quickly": ("rapidly", "slowly"),
    "difficult": ("hard", "easy"),
    "easy": ("simple", "difficult"),
    "wealthy": ("rich", "poor"),
    "was purchased by": ("was bought by", "was sold by"),
    "was bought by": ("was purchased by", "was sold by"),
    "expensive": ("costly", "cheap"),
    "frequently": ("often", "rarely"),
    "often": ("frequently", "rarely"),
    "rarely": ("seldom", "often"),
    "initially": ("at first", "in the end"),
    "modern": ("contemporary", "ancient"),
    "strong": ("powerful", "weak"),
    "dangerous": ("hazardous", "safe"),
    "happy": ("glad", "sad"),
    "supported by": ("backed by", "opposed by"),
    "rejected by": ("turned down by", "accepted by"),
    "was allowed to": ("was permitted to", "was forbidden to"),
    "were allowed to": ("were permitted to", "were forbidden to"),
    "was unable to": ("could not", "was able to"),
    "were unable to": ("could not", "were able to"),
    "failed to": ("did not", "managed to"),
    "refused to": ("declined to", "agreed to"),
    "agreed to": ("consented to", "refused to"),
    "was built in": ("was constructed in", "was demolished in"),
    "was founded in": ("was established in", "was dissolved in"),
    "was established in": ("was founded in", "was dissolved in"),
    "He died in": ("He passed away in", "He was born in"),
    "She died in": ("She passed away in", "She was born in"),
    "prior to": ("before", "after"),
    "near the": ("close to the", "far from the"),
    "inside the": ("within the", "outside the"),
    "at the beginning of": ("at the start of", "at the end of"),
    "at the start of": ("at the beginning of", "at the end of"),
    "together with": ("along with", "without"),
    "older brother": ("elder brother", "younger brother"),
    "older sister": ("elder sister", "younger sister"),
    "the following year": ("the next year", "the previous year"),
    "the following season": ("the next season", "the previous season"),
    "the previous year": ("the year before", "the year after"),
    "more than": ("over", "less than"),
    "at least": ("no fewer than", "at most"),
}
ONLY_NUMBERS: Final = ("more than", "at least")  # phrases that are replaced only before a number

CONTRACTED: Final = {
    f"{verb} not": f"{verb}n't"
    for verb in ("is", "are", "was", "were", "did", "does", "do", "has", "have", "had", "could", "would", "should")
} | {"cannot": "can't"}

NUMBERS: Final = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
FIRST_NUMBER: Final = 2

# Names that can replace each other: of places, and of people.
PLACES: Final = (
    ("France", "Germany", "Italy", "Spain", "Poland", "Sweden", "Norway", "Hungary", "Portugal", "Austria", "Belgium"),
    ("Japan", "China", "India", "Indonesia", "Brazil", "Mexico", "Nigeria", "Kenya", "Egypt", "Argentina", "Canada"),
    ("London", "Paris", "Berlin", "Rome", "Madrid", "Vienna", "Moscow", "Dublin", "Athens", "Tokyo", "Sydney"),
    ("Chicago", "Boston", "Dallas", "Detroit", "Houston", "Seattle", "Denver", "Atlanta", "Philadelphia", "Miami"),
)
PEOPLES_NAMES: Final = (
    ("John", "William", "James", "Robert", "Thomas", "Michael", "Peter", "Richard", "Charles", "Paul", "Henry"),
    ("Mary", "Elizabeth", "Anna", "Sarah", "Margaret", "Alice", "Helen", "Emma", "Laura", "Susan", "Catherine"),
)

NAMES: Final = (*PLACES, *PEOPLES_NAMES)
PLACE_NAME: Final = "|".join(name for names in PLACES for name in names)
PERSON_NAME: Final = "|".join(name for names in PEOPLES_NAMES for name in names)
# A place that is not part of a longer name, and a person's first name.
ANY_NAME: Final = re.compile(rf"(?<! at )\b(?:(?:{PLACE_NAME})(?! [A-Z0-9])|(?:{PERSON_NAME}) [A-Z])")

SYMMETRIC: Final = (
    "(?:married|faced|resembled|equalled|dated|divorced|partnered|tied)"  # verbs that hold in both directions
)
DOES_TO: Final = (  # the words between a subject and its object
    rf"(?:(?!{SYMMETRIC}\b)[a-z]+ed|beat|overtook|taught|led|won|left|bought|sold|hit|lost to|was [a-z]+(?:ed|en) by)"
)
PLACE: Final = "(?:park|street|snow|kitchen|field|store|room|grass|pool|ocean|beach|yard|forest|garden|city|lake|river)"
PEOPLE: Final = "(?:man|woman|boy|girl|child|dog|lady|toddler|baby|player|person|guy|cat|horse|bird|teacher|student)"

SUBORDINATE: Final = re.compile(
    r"\b(?:that|who|whom|whose|which|what|where|when|while|because|if|after|before|until|since|although|though|as|but|and|or|than)\b"
)
NO_NAME: Final = (
    "(?:He|She|It|They|We|You|This|That|There|These|Those|The|A|An|Another|Both|All|Some|Many|Most|His|Her|In|On)"
)
NAME: Final = rf"(?!{NO_NAME}\b)[A-Z][\w’'-]+(?: [A-Z][\w’'-]+){{0,2}}"
MONTH: Final = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE: Final = rf"(?:in|on) (?:{MONTH} )?(?:\d{{1,2}} {MONTH} )?(?:{MONTH} \d{{1,2}} )?\d{{4}}"
LEADING: Final = re.compile(r"((?:In|On|At|During|From|Until) [^,]{2,45}), ([^,]*[^,\d])\.")
TRAILING: Final = re.compile(rf"([^,]+) ({DATE})\.")
LONG_NAME: Final = re.compile(rf"(?!{NO_NAME}\b)[A-Z][\w’'-]+ [A-Z]")  # a first word that keeps its capital
LOWERED: Final = {"He", "She", "It", "They", "The", "A", "An", "His", "Her", "Its", "Their", "This", "These", "Another"}
PARTICIPLE: Final = r"(?:been|become|won|made|had|\w+ed)\b"
AUXILIARY: Final = re.compile(
    rf"\b(?:is|are|was|were|can|could|will|would|should|must|(?:has|have|had)(?= {PARTICIPLE}))\b"
    r"(?! (?:also|still|only|already|not|never|no)\b)"
)
ANY_AUXILIARY: Final = re.compile(
    r"\b(?:is|are|was|were|has|have|had|can|could|will|would|should|must|may|might|do|did|does)\b"
)
NEGATIVE: Final = re.compile(
    r"n['’]t\b|\b(?:not|never|no|none|nor|neither|without|cannot|hardly|rarely|seldom|few|any)\b"
)
FINITE: Final = r"(?:was|were|is|are|had|has|could|would|did|won|left|began|became|took|made|went|lost|fell|\w+ed)"
CLAUSE: Final = rf"(?:He|She|They|he|she|they|[Tt]he \w+(?: \w+)?|{NAME}) {FINITE}\b[^,]*?"
TWO_CLAUSES: Final = re.compile(rf"({CLAUSE}) (because|before|after) ({CLAUSE})\.")
JOURNEY: Final = re.compile(rf" from ({NAME}) to ({NAME})(?=\.| (?:in|on|at|for|with|by|as|via|during)\b)")
COUNTED: Final = re.compile(
    rf"(?<![\w-])(\d{{1,2}}|{'|'.join(NUMBERS)}|{'|'.join(map(str.capitalize, NUMBERS))}) (?=[a-z]+s\b)"
)
NOT_COUNTED: Final = re.compile(r"(?:[A-Z][\w’'-]*|[\d,.-]+|number|than|least|most) $")
OF_PEOPLE: Final = re.compile(
    rf"An? ((?:\w+ ){{0,2}}{PEOPLE}) (is \w+ing(?: at)?) an? ((?:\w+ ){{0,2}}{PEOPLE}) "
    rf"((?:in|on|at|near|outside) (?:a|an|the) (?:\w+ )?{PLACE})\."
)
OF_NAMES: Final = re.compile(
    rf"((?:In|On) [^,]{{2,45}}, )?((?:[Tt]he )?{NAME}) ({DOES_TO}) ((?:the )?{NAME})"
    r"((?: (?:in|on|at|during|for|with|to) [^,]+)?)\."
)


def _phrases(table: Iterable[str]) -> re.Pattern[str]:
    number = rf"(?= (?:\d|(?:{'|'.join(NUMBERS)})\b))"
    listed = "|".join(phrase + number if phrase in ONLY_NUMBERS else phrase for phrase in table)
    return re.compile(rf"(\b[Aa]n? )?(?<![\w-])({listed})\b(?!-)")


PHRASES_WITH_SYNONYM: Final = _phrases(SYNONYMS)
PHRASES_WITH_ANTONYM: Final = _phrases(ANTONYMS)
LONG_FORMS: Final = _phrases(CONTRACTED)


def is_plain(sentence: str) -> bool:
    """Whether the rules suit the sentence: 5 to 30 words, one period at its end, commas but few other marks."""
    return (
        sentence.endswith(".")
        and sentence[:1].isupper()
        and WORDS[0] <= len(sentence.split()) <= WORDS[1]
        and not MARKS.search(sentence)
    )


# The meaning stays the same


def moved(sentence: str, rng: Generator) -> str | None:
    """Move a phrase between the beginning and the end of a sentence of one clause."""
    if SUBORDINATE.search(sentence):
        return None
    if match := LEADING.fullmatch(sentence):
        phrase, clause = match.groups()
        return f"{clause[0].upper()}{clause[1:]} {phrase[0].lower()}{phrase[1:]}."
    if match := TRAILING.fullmatch(sentence):
        clause, phrase = match.groups()
        if clause.split()[0] in LOWERED or LONG_NAME.match(clause):
            return f"{phrase[0].upper()}{phrase[1:]}, {_lowered(clause)}."
    return None


def synonym(sentence: str, rng: Generator) -> str | None:
    """Replace one word or phrase of `SYNONYMS`."""
    match = _any(PHRASES_WITH_SYNONYM, sentence, rng)
    return _replace(match, SYNONYMS[match[2]], sentence) if match else None


def contraction(sentence: str, rng: Generator) -> str | None:
    """Contract `did not` to `didn't`."""
    match = _any(LONG_FORMS, sentence, rng)
    return _replace(match, CONTRACTED[match[2]], sentence) if match else None


def other_form(sentence: str, rng: Generator) -> str | None:
    """Write a number of things from 2 to 20 as digits instead of a word, or as a word instead of digits."""
    match = _counted(sentence)
    if match is None:
        return None
    number = match[1]
    return _put(sentence, match, _words(number) if number.isdigit() else str(_value(number)))


SAME: Final[Sequence[Rule]] = (moved, synonym, contraction, other_form)


def paraphrase(sentence: str, rng: Generator) -> str | None:
    """Apply one rule that keeps the meaning."""
    places: list[int] = rng.permutation(len(SAME)).tolist()
    tried = (SAME[place](sentence, rng) for place in places)
    return next((rewritten for rewritten in tried if rewritten is not None), None)


def paraphrases(sentence: str, rng: Generator) -> str | None:
    """Apply every rule that keeps the meaning; None if fewer than two apply."""
    applied = 0
    for rule in SAME:
        rewritten = rule(sentence, rng)
        if rewritten is not None:
            sentence, applied = rewritten, applied + 1
    return sentence if applied > 1 else None


def misspelt(sentence: str, rng: Generator) -> str | None:
    """Make a typing error in every third word of four letters or more: exchange, drop or double a letter."""
    words = sentence.split(" ")
    places = [place for place, word in enumerate(words) if re.fullmatch(r"[a-z]{4,}", word)]
    chosen = places[::3] if len(places) > 3 else []
    for place in chosen:
        words[place] = _typed(words[place], rng)
    return " ".join(words) if chosen else None


# The meaning changes


def negation(sentence: str, rng: Generator) -> Rewritten | None:
    """Put `not` after the only auxiliary verb of a sentence of one clause."""
    if SUBORDINATE.search(sentence) or NEGATIVE.search(sentence) or len(ANY_AUXILIARY.findall(sentence)) != 1:
        return None
    match, near = AUXILIARY.search(sentence), paraphrase(sentence, rng)
    if match is None or near is None:
        return None
    return near, f"{sentence[: match.end()]} not{sentence[match.end() :]}"


def swapped_roles(sentence: str, rng: Generator) -> Rewritten | None:
    """Exchange subject and object. In the other text a phrase is moved, and all words stay."""
    if SUBORDINATE.search(sentence):
        return None
    if match := OF_PEOPLE.fullmatch(sentence):
        who, does, whom, where = match.groups()
        whom, who = _with_article(whom), _with_article(who)
        same = f"{where[0].upper()}{where[1:]}, {who} {does} {whom}."
        return None if who == whom else (same, f"{whom[0].upper()}{whom[1:]} {does} {who} {where}.")
    match, near = OF_NAMES.fullmatch(sentence), moved(sentence, rng)
    if match is None or near is None or match[2] == match[4]:
        return None
    when, who, does, whom, rest = match.groups(default="")
    whom = whom if when else whom[0].upper() + whom[1:]
    return near, f"{when}{whom} {does} {_lowered(who)}{rest}."


def other_order(sentence: str, rng: Generator) -> Rewritten | None:
    """Exchange two places of a journey, or two clauses. The other text reorders the words but keeps the meaning."""
    if (match := JOURNEY.search(sentence)) and not re.search(MONTH, match[0]) and match[1] != match[2]:
        start, end = match.groups()
        before, after = sentence[: match.start()], sentence[match.end() :]
        return f"{before} to {end} from {start}{after}", f"{before} from {end} to {start}{after}"
    match = TWO_CLAUSES.fullmatch(sentence)
    if match is None or len(SUBORDINATE.findall(sentence)) != 1:
        return None
    first, word, second = match.groups()
    near = f"{word.capitalize()} {second}, {_lowered(first)}."
    return near, f"{second[0].upper()}{second[1:]} {word} {_lowered(first)}."


def other_number(sentence: str, rng: Generator) -> Rewritten | None:
    """Change a number of things from 2 to 20. The other text has it in its other form, as a word or as digits."""
    match, near = _counted(sentence), other_form(sentence, rng)
    if match is None or near is None:
        return None
    old = _value(match[1])
    new = FIRST_NUMBER + (old - FIRST_NUMBER + int(rng.integers(1, len(NUMBERS)))) % len(NUMBERS)
    written = str(new) if match[1].isdigit() else _words(str(new))
    return near, _put(sentence, match, written)


def other_name(sentence: str, rng: Generator) -> Rewritten | None:
    """Replace a name by another of its list, everywhere in the sentence."""
    near = paraphrase(sentence, rng) if ANY_NAME.search(sentence) else None
    if near is None:
        return None
    for names in NAMES:
        present = {name for name in names if re.search(rf"\b{name}\b", sentence)}
        if len(present) == 1:
            others = sorted(set(names) - present)
            return near, re.sub(rf"\b{present.pop()}\b", others[rng.integers(len(others))], sentence)
    return None


def antonym(sentence: str, rng: Generator) -> Rewritten | None:
    """Replace one word or phrase by its opposite. In the other text a synonym replaces it."""
    match = _any(PHRASES_WITH_ANTONYM, sentence, rng)
    if match is None:
        return None
    same, opposite = (_replace(match, new, sentence) for new in ANTONYMS[match[2]])
    return same, opposite


def _any(phrases: re.Pattern[str], sentence: str, rng: Generator) -> re.Match[str] | None:
    """One of the phrases in the sentence: group 1 is the article before it, group 2 the phrase."""
    matches = list(phrases.finditer(sentence))
    return matches[rng.integers(len(matches))] if matches else None


def _replace(old: re.Match[str], new: str, sentence: str) -> str:
    """Replace a phrase, and correct the article before it."""
    article: str = old[1][0] + ("n " if new[0] in "aeiou" else " ") if old[1] else ""
    return sentence[: old.start()] + article + new + sentence[old.end() :]


def _lowered(clause: str) -> str:
    """The clause, as it is written after another one."""
    return clause[0].lower() + clause[1:] if clause.split()[0] in LOWERED else clause


def _with_article(people: str) -> str:
    return f"{'an' if people[0] in 'aeiou' else 'a'} {people}"


def _counted(sentence: str) -> re.Match[str] | None:
    """The first number of things from 2 to 20. Dates and parts of numbers do not count."""
    for match in COUNTED.finditer(sentence):
        value = _value(match[1])
        if FIRST_NUMBER <= value < FIRST_NUMBER + len(NUMBERS) and not NOT_COUNTED.search(sentence[: match.start()]):
            return match
    return None


def _value(number: str) -> int:
    return int(number) if number.isdigit() else FIRST_NUMBER + NUMBERS.index(number.lower())


def _words(number: str) -> str:
    return NUMBERS[int(number) - FIRST_NUMBER]


def _put(sentence: str, match: re.Match[str], number: str) -> str:
    """Replace a number by another, which is capitalised at the beginning of the sentence."""
    number = number.capitalize() if not match.start() else number
    return sentence[: match.start()] + number + sentence[match.end(1) :]


def _typed(word: str, rng: Generator) -> str:
    at = int(rng.integers(1, len(word) - 1))
    typo = rng.integers(3)
    if typo == 0 and word[at] != word[at + 1]:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + word[at + 1 :] if typo == 1 else word[: at + 1] + word[at:]
