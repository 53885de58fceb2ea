"""Where the public data sets are: `data/` in the clone, or the folder `shared/data` beside it."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
DATA = next((path for path in (_ROOT / "data", _ROOT.parent / "shared" / "data") if path.is_dir()), _ROOT / "data")
