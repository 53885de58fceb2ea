"""Fine-tune an encoder by a recipe, evaluate it, and export it as a bundle."""

from importlib.util import find_spec

if find_spec("torch") is None or find_spec("transformers") is None:
    raise SystemExit("error: training needs torch and transformers: pip install -c constraints.txt -e '.[train]'")
