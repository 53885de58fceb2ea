"""S-SimCSE (arXiv:2111.11750): SimCSE whose dropout rates are drawn anew for each pass.

The paper gives neither the distribution's parameters, nor whether attention probabilities count, nor a rescaling; here
a rate is uniform in [0, 0.2] (in the mean SimCSE's 0.1), they count, and a row is scaled by its own 1 / (1 - rate).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from training.dropout import FORMS, Distribution, Dropouts, draw_rates, well_formed
from training.encoder import SentenceEncoder
from training.objective import View
from training.objectives.simcse import SimCSE, SimCSERecipe

__all__ = ["SSimCSE", "SSimCSERecipe"]


class SSimCSERecipe(SimCSERecipe):
    """The keys of `method = "ssimcse"`."""

    method: Literal["ssimcse"]
    scope: Literal["pass", "op", "sentence", "sentence-op"] = Field(
        "pass", description="what has a rate of its own: a pass, each dropout operation, each sentence, or the last two"
    )
    distribution: Distribution = Field(
        "uniform", description="what rates are drawn from: fixed, uniform, beta, truncnormal or choice"
    )
    rates: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field(
        (0.0, 0.2), description="the distribution's numbers; uniform: lowest and highest rate"
    )
    attention_dropout: bool = Field(
        True, description="draw the rates of attention probabilities too; otherwise they keep the encoder's own"
    )

    @model_validator(mode="after")
    def _rates(self) -> Self:
        if not well_formed(self.distribution, self.rates):
            raise ValueError(
                f"rates is {list(self.rates)}; distribution {self.distribution!r} takes {FORMS[self.distribution]}"
            )
        return self


class SSimCSE(SimCSE):
    """Section 3: `pass` and `op` are the paper's "w/o sd", `sentence` (section 3.2) and `sentence-op` its "w/ sd"."""

    Recipe = SSimCSERecipe

    def __init__(self, encoder: SentenceEncoder, recipe: SSimCSERecipe) -> None:
        super().__init__(encoder, recipe)
        self.dropouts = Dropouts.install(encoder.backbone, recipe.attention_dropout)

    def draw(self, views: dict[str, View]) -> dict[str, View]:
        return {name: view | {"rates": self._rates(view)} for name, view in super().draw(views).items()}

    def encode(self, name: str, view: View) -> Tensor:
        with self.dropouts.at(view["rates"]):
            return super().encode(name, {key: value for key, value in view.items() if key != "rates"})

    def _rates(self, view: View) -> Tensor:
        """A rate for each row and operation of a pass, (n, operations)."""
        scope, ids = self.recipe.scope, view["input_ids"]
        rows = len(ids) if scope.startswith("sentence") else 1
        operations = len(self.dropouts) if scope.endswith("op") else 1
        rates = draw_rates(self.recipe.distribution, self.recipe.rates, (rows, operations))
        return rates.to(ids.device).expand(len(ids), len(self.dropouts))
