"""The score of a template: how well an encoder's vectors in it rank scored pairs."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from encoding.errors import TemplateError
from training.data.corpus import read_lines
from training.data.scored_pairs import Pairs, spearman
from training.errors import CorpusError, EncoderError
from training.model.encoder import SentenceEncoder
from training.model.pooling import Pooling

__all__ = ["Scorer", "Watched", "read_templates"]


class Scorer:
    """A loaded encoder that scores one template after the other on the pairs."""

    def __init__(self, encoder: SentenceEncoder, pairs: Pairs, denoise: bool = False) -> None:
        if encoder.tokenizer.mask_token_id is None:
            raise EncoderError("the encoder's tokenizer has no mask token for mask pooling; choose another encoder")
        self.encoder = encoder
        self.pairs = pairs
        self.denoise = denoise

    def __call__(self, template: str) -> float:
        self.encoder.pooling = self.pooling(template)
        return spearman(self.encoder.embed, self.pairs)

    def pooling(self, template: str) -> Pooling:
        """Raises TemplateError for a template that cannot be used."""
        return self.encoder.make_pooling(template, self.encoder.config.max_tokens, self.denoise, "mask")

    def takes(self, template: str) -> bool:
        try:
            self.pooling(template)
        except TemplateError:
            return False
        return True


def read_templates(path: Path, scorer: Scorer) -> list[str]:
    """One template per line, without blank lines. Raises CorpusError or TemplateError, which name the line."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a file of templates, one per line")
    templates = []
    for number, line in enumerate(read_lines(path), 1):
        template = line.strip()
        if not template:
            continue
        try:
            scorer.pooling(template)
        except TemplateError as error:
            raise TemplateError(f"{path}, line {number}: {error}") from error
        templates.append(template)
    if not templates:
        raise CorpusError(f"{path} has no templates; write one per line, such as: [X] means [MASK].")
    return list(dict.fromkeys(templates))


class Watched(Progress):
    """A score function under a progress bar that names the template."""

    def __init__(self, scorer: Scorer, total: int) -> None:
        console = Console(stderr=True)
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.scorer = scorer
        self.add_task("", total=total)

    def __call__(self, template: str) -> float:
        (task,) = self.task_ids
        self.update(task, description=template)
        score = self.scorer(template)
        self.advance(task)
        return score
