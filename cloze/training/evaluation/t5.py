"""Templates that T5 writes around words and their definitions, for all examples at once.

LM-BFF (arXiv:2012.15723) section 5.2, with words and definitions as in PromptBERT section 4.2. The source is
`<extra_id_0> word <extra_id_1> definition`, or the definition first. One beam search fills both gaps. A step's score is
its log-probability, summed over the examples.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from cloze.encoding.errors import TemplateError
from cloze.encoding.template import MASK, TEXT, Template
from cloze.training.bar import bar
from cloze.training.data.corpus import read_records
from cloze.training.errors import CorpusError, EncoderError
from cloze.training.model.encoder import loading

ROWS: Final = 128  # sequences that pass through the decoder at once
SENTINELS: Final = ("<extra_id_0>", "<extra_id_1>", "<extra_id_2>")


class Example(NamedTuple):
    """Such as `orange`, and `a large round juicy citrus fruit with a tough bright reddish-yellow rind`."""

    word: str
    definition: str


def read_definitions(path: Path) -> list[Example]:
    """Read a csv, tsv or jsonl file with the columns `word` and `definition`. Raises CorpusError, with the line."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a csv, tsv or jsonl file with the columns word and definition")
    examples = []
    for number, record in read_records(path):
        cells = [record.get(name) for name in Example._fields]
        if not all(isinstance(cell, str) and cell.strip() for cell in cells):
            columns = ", ".join(map(str, record))
            raise CorpusError(
                f"{path}, line {number}: a word and a definition are required, but its columns are {columns}; add them"
            )
        examples.append(Example(*(" ".join(str(cell).split()) for cell in cells)))
    if not examples:
        raise CorpusError(f"{path} has no definitions; write the columns word and definition")
    return examples


class TemplateWriter:
    """A T5 with its tokenizer, which writes templates."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        self.sentinels = tuple(ids[name] for name in SENTINELS)
        # the tokens that a gap may hold; the output matrix may be padded
        self.plain = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        self.plain[: len(tokenizer)] = True
        self.plain[tokenizer.all_special_ids] = False

    @classmethod
    def load(cls, source: str) -> Self:
        """Raises EncoderError for a folder or hub name that is not a T5."""
        with loading(source, "a T5"):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model, loading_info = AutoModelForSeq2SeqLM.from_pretrained(
                source, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
            )
        if missing := sorted(loading_info["missing_keys"]):
            raise EncoderError(f"{source!r} lacks the weights {missing[0]} and {len(missing) - 1} more; get it again")
        absent = [name for name in SENTINELS if name not in tokenizer.get_vocab()]
        if absent:
            raise EncoderError(f"{source!r} has no token {absent[0]}; give a T5, which marks gaps with it")
        return cls(model, tokenizer)

    def write(self, examples: Sequence[Example], count: int, longest: int = 20) -> dict[str, float]:
        """The `count` likeliest templates and their log-probabilities summed over the examples, likeliest first.

        Each order of word and definition has its own search with `count` beams; a search writes at most `longest`
        tokens, including the sentinels that close the gaps.
        """
        written: dict[str, float] = {}
        for word_first in (True, False):
            for ids, score in self.search(self.sources(examples, word_first), count, longest):
                template = self._template(ids, word_first)
                if _usable(template):  # a template may occur in two tokenisations: keep the likelier one
                    written[template] = max(score, written.get(template, -torch.inf))
        return dict(sorted(written.items(), key=lambda item: -item[1])[:count])

    def sources(self, examples: Sequence[Example], word_first: bool) -> list[list[int]]:
        """The token ids that T5 reads, one list per example."""
        first, second, _ = self.sentinels
        sources = []
        for texts in examples:
            word, definition = (self.tokenizer(text, add_special_tokens=False).input_ids for text in texts)
            gaps = [first, *word, second]
            sources.append([*gaps, *definition] if word_first else [*definition, *gaps])
        return [[*ids, self.tokenizer.eos_token_id] for ids in sources]

    @torch.no_grad()
    def search(self, sources: Sequence[list[int]], count: int, longest: int) -> list[tuple[list[int], float]]:
        """Fillings of the gaps, `first gap <extra_id_1> second gap`, with their log-probability, likeliest first.

        Beams in the first gap, beams in the second gap and finished beams do not compete: `count` of each are kept, so
        that a T5 that tends to long gaps still finishes.
        """
        encoded, attention = self._encode(sources)
        _, second, third = self.sentinels
        prefixes = torch.tensor([[self.model.config.decoder_start_token_id, self.sentinels[0]]])  # (beams, t)
        scores = torch.zeros(1)  # (beams)
        done: list[tuple[list[int], float]] = []
        for _ in bar(range(longest), desc="writing", unit=" tokens"):
            total = scores.unsqueeze(1) + self._next(prefixes, encoded, attention)  # (beams, vocabulary)
            in_second = (prefixes == second).any(1)
            done += zip(prefixes[in_second, 2:].tolist(), total[in_second, third].tolist(), strict=True)
            done = sorted(done, key=lambda item: -item[1])[:count]
            first_gap = self.plain & ~in_second.unsqueeze(1)
            second_gap = self.plain & in_second.unsqueeze(1)
            second_gap[:, second] = ~in_second
            grown = [_best(prefixes, total.masked_fill(~gap, -torch.inf), count) for gap in (first_gap, second_gap)]
            prefixes, scores = (torch.cat(parts) for parts in zip(*grown, strict=True))
            if len(done) == count and done[-1][1] >= scores.max():  # longer beams are less likely
                break
        return done

    def _encode(self, sources: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        rows = [torch.tensor(source, device=self.model.device) for source in sources]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.model.config.pad_token_id)
        attention = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return self.model.get_encoder()(input_ids=ids, attention_mask=attention).last_hidden_state, attention

    def _next(self, prefixes: Tensor, encoded: Tensor, attention: Tensor) -> Tensor:
        """Log-probabilities (beams, vocabulary) of the next token, summed over the n encoded examples (n, L, d)."""
        examples = len(encoded)
        sums = []
        for part in prefixes.split(max(1, ROWS // examples)):
            logits = self.model(
                encoder_outputs=BaseModelOutput(encoded.repeat(len(part), 1, 1)),
                attention_mask=attention.repeat(len(part), 1),
                decoder_input_ids=part.repeat_interleave(examples, dim=0).to(encoded.device),
            ).logits[:, -1]
            sums.append(logits.log_softmax(-1).unflatten(0, (len(part), examples)).sum(1))
        return torch.cat(sums).cpu()

    def _template(self, ids: list[int], word_first: bool) -> str:
        gap = ids.index(self.sentinels[1])
        before, after = self._words(ids[:gap]), self._words(ids[gap + 1 :])
        return f"{before} {MASK}{after} {TEXT}".strip() if word_first else f"{TEXT}{before} {MASK}{after}"

    def _words(self, ids: list[int]) -> str:
        """The text of `ids`, after a blank if its first token begins a word."""
        if not ids:
            return ""
        begins = str(self.tokenizer.convert_ids_to_tokens(ids[0])).startswith("▁")
        return " " * begins + str(self.tokenizer.decode(ids)).strip()


def _best(prefixes: Tensor, total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest continuations: prefixes (n, t + 1) and scores (n)."""
    scores, places = total.flatten().topk(min(count, total.numel()))
    scores, places = scores[scores > -torch.inf], places[scores > -torch.inf]
    beams, tokens = places // total.shape[1], places % total.shape[1]
    return torch.cat([prefixes[beams], tokens.unsqueeze(1)], dim=1), scores


def _usable(template: str) -> bool:
    try:
        Template.parse(template, "mask")
    except TemplateError:
        return False
    return True
