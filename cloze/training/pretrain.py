"""cloze pretrain [--key-name value ...]: masked language modelling, continued or from scratch.

This is the recipe `mlm` of cloze fit. The run's model/ is a masked language model that transformers, the prompt
methods and DiffCSE's generator can load. As an encoder it can be trained further, evaluated and exported.
"""

import sys
from collections.abc import Sequence

from cloze.command import run
from cloze.training.recipes.command import recipe_of, resumed


def main(arguments: Sequence[str] | None = None) -> int:
    """Raises ClozeError."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if path := resumed(words):
        from cloze.training.loop.run import resume

        return resume(path)
    recipe, options = recipe_of("mlm", words, "cloze pretrain")

    from cloze.training.loop.run import train  # torch takes seconds to load; help and key errors need not wait

    return train(recipe, options, "mlm")


if __name__ == "__main__":
    sys.exit(run(main))
