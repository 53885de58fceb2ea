"""The mean of several runs' weights, as a run.

Runs from one parent with different recipes, say one for sentences and one for search, lie so close together that the
mean of their weights is also a model, often a better one than each of them, at the same cost (model soups,
arXiv:2203.05482). A run and its parent are as close, and their mean forgets less of what the parent knows about other
text (WiSE-FT, arXiv:2109.01903).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloze.training.bar import console
from cloze.training.encoder_source import kind_of
from cloze.training.errors import RunError
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run, differ, parent_name


def average(
    runs: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    parent_share: float = 0.0,
    parent: str = "",
) -> None:
    """Write the run `out`. Its weights are the mean of the weights of `runs`. Raises RunError, EncoderError."""
    mean_run = Run.fresh(out)
    mean, provenance = average_weights(runs, weights, parent_share, parent)
    mean_run.make()
    mean.save(mean_run.model)
    mean_run.write_provenance(provenance)
    count = len(runs) + bool(parent_share)
    console.print(f"{mean_run.model}: the mean of {count} models; next: {mean_run.export_command}")


def average_weights(
    runs: Sequence[Path], weights: Sequence[float] | None = None, parent_share: float = 0.0, parent: str = ""
) -> tuple[SentenceEncoder, dict[str, Any]]:
    """The mean of the runs' encoders, and its provenance. Raises RunError, EncoderError.

    `weights` are the mixing coefficients, one per run. They need not sum to 1, and are equal by default. The parent has
    the coefficient `parent_share`, which may be 0. By default the parent is the encoder that the first run's recipe
    names. If a run continues another one, its recipe names that run; give `parent`, the parent of both, instead.
    """
    shares = _checked_shares(runs, weights, parent_share)
    provenances = [Run(run).provenance() for run in runs]
    described = _provenance(provenances, shares.tolist(), parent_share, parent)
    encoders = [SentenceEncoder.load(str(Run(run).model)) for run in runs]
    weighed = [str(run) for run, encoder in zip(runs, encoders, strict=True) if encoder.token_weights is not None]
    if weighed:
        raise RunError(f"{', '.join(weighed)} came from cloze weigh; average the runs first, and weigh their mean")
    _check_alike(runs, provenances, encoders, bool(parent))
    mean = encoders[0]
    states = [encoder.state_dict() for encoder in encoders]
    parts = shares if shares.sum().isfinite() else shares / shares.max()
    parts = parts / parts.sum()
    source = parent or provenances[0]["recipe"]["encoder"]
    if parent_share:
        ancestor = _parent(source, mean)
        if alone := mean.state_dict().keys() ^ ancestor.state_dict().keys():
            raise RunError(f"only one of {runs[0]} and its parent {source} has {min(alone)}; omit --parent-share")
        _refuse_difference(runs[0], Path(source), "shapes", _shapes(mean), _shapes(ancestor))
        states.append(ancestor.state_dict())
        parts = torch.cat([parts * (1 - parent_share), torch.tensor([parent_share], dtype=parts.dtype)])
    mean.reconfigure(
        mean.config.model_copy(update={"max_tokens": max(encoder.config.max_tokens for encoder in encoders)})
    )
    mean.load_state_dict({name: mean_of([state[name] for state in states], parts) for name in states[0]})
    return mean, described


def _checked_shares(runs: Sequence[Path], weights: Sequence[float] | None, parent_share: float) -> Tensor:
    """The runs' mixing coefficients, (n). Raises RunError if they or the runs cannot be averaged."""
    if len(runs) < (1 if parent_share else 2):
        raise RunError(
            f"a mean needs two runs or more, or --parent-share; found {len(runs)}: {', '.join(map(str, runs))}"
        )
    for run in runs:
        if Run(run).finished and Run(run).provenance()["recipe"].get("method") == "mlm":
            raise RunError(
                f"{run} is a run of cloze pretrain, and a mean would lose its masked-word head; train it with cloze "
                "fit first"
            )
    shares = torch.tensor(weights or [1.0] * len(runs), dtype=torch.float64)
    if len(shares) != len(runs):
        raise RunError(f"{len(shares)} weights for {len(runs)} runs; give one per run, or none")
    twice = next((run for place, run in enumerate(runs) if run.resolve() in map(Path.resolve, runs[:place])), None)
    if twice is not None and not weights:
        raise RunError(f"{twice} is named twice; name each run once, or give the share of each with --weights")
    for run in runs:
        if kind_of(str(run)) != "run":
            raise RunError(f"{run} is not a run; average takes folders that cloze fit wrote")
    return shares


def _check_alike(
    runs: Sequence[Path],
    provenances: Sequence[dict[str, Any]],
    encoders: Sequence[SentenceEncoder],
    parent_is_given: bool,
) -> None:
    """Raises RunError unless the runs share embedding configuration, shapes and, if none is given, the parent."""
    for run, provenance, encoder in zip(runs[1:], provenances[1:], encoders[1:], strict=True):
        if not parent_is_given:
            _refuse_difference(runs[0], run, "parents", provenances[0]["parent"], provenance["parent"])
            first, second = Run(runs[0]).encoder_digest, Run(run).encoder_digest
            if first and second and differ(first, second):
                raise RunError(
                    f"{runs[0]} and {run} have different parents with the same name, {provenance['parent']!r}; average "
                    "runs that share one"
                )
        _refuse_difference(runs[0], run, "embedding configurations", _config_of(encoders[0]), _config_of(encoder))
        _refuse_difference(runs[0], run, "shapes", _shapes(encoders[0]), _shapes(encoder))


def _parent(source: str, run: SentenceEncoder) -> SentenceEncoder:
    """The runs' parent, with the embedding configuration of the runs. Raises EncoderError."""
    config = run.config
    return SentenceEncoder.load(source, template=config.template, pooling=config.pooling, max_tokens=config.max_tokens)


def mean_of(tensors: Sequence[Tensor], shares: Tensor) -> Tensor:
    """The weighted mean, summed in fp64. Of integers (counts, positions), which no run changes, the first tensor."""
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack([tensor.double() for tensor in tensors], -1).mul(shares).sum(-1).to(tensors[0].dtype)


def _config_of(encoder: SentenceEncoder) -> str:
    """The embedding configuration without `max_tokens`, which training may have lowered to save time."""
    return str(encoder.config.model_dump(exclude={"max_tokens"}))


def _shapes(encoder: SentenceEncoder) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in encoder.state_dict().items())


def _refuse_difference(first: Path, second: Path, properties: str, first_value: str, second_value: str) -> None:
    if first_value != second_value:
        shown = f" ({first_value}; {second_value})" if len(first_value + second_value) < 400 else ""
        raise RunError(f"{first} and {second} have different {properties}{shown}; average runs that share them")


def _provenance(
    parts: Sequence[dict[str, Any]], weights: Sequence[float], parent_share: float, parent: str
) -> dict[str, Any]:
    """The provenance of the first run with the recipes, files, rows and seeds of all runs."""
    data = {source["sha256"]: source for part in parts for source in part["data"]}
    recipe: dict[str, Any] = {
        "method": "average",
        "encoder": parent or parts[0]["recipe"]["encoder"],
        "weights": list(weights),
        "parent_share": parent_share,
        "runs": [part["recipe"] for part in parts],
    }
    if any(run["method"] == "average" for run in recipe["runs"]):
        shares = list(_shares(recipe, 1.0, recipe["encoder"]))
        runs = [(run, share) for run, share in shares if run is not None]
        recipe |= {
            "weights": [share for _, share in runs],
            "parent_share": sum(share for run, share in shares if run is None),
            "runs": [run for run, _ in runs],
        }
    together = {
        "recipe": recipe,
        "data": list(data.values()),
        "seeds": [seed for part in parts for seed in part["seeds"]],
        "rows": max(part["rows"] for part in parts),
    }
    common = {name: parts[0][name] for name in ("parent", "commit", "versions")}
    return common | ({"parent": parent_name(parent)} if parent else {}) | together


def _shares(recipe: dict[str, Any], share: float, parent: str) -> Iterator[tuple[dict[str, Any] | None, float]]:
    """The recipes that a mean combines, at any depth, with the coefficient of each; None stands for the parent.

    Raises RunError if one of the runs is a mean with another parent.
    """
    if recipe["method"] != "average":
        yield recipe, share
        return
    parent_share, sizes = recipe["parent_share"], recipe["weights"]
    if parent_share and recipe["encoder"] != parent:
        raise RunError(
            f"one of the runs is a mean that includes {recipe['encoder']}, not {parent}; average the runs that it was "
            "made from"
        )
    yield None, share * parent_share
    for run, size in zip(recipe["runs"], sizes, strict=True):
        yield from _shares(run, share * (1 - parent_share) * size / sum(sizes), parent)
