"""How every command ends: 0 when done, 1 on an error that its user can put right, 130 after Ctrl-C.

Usage errors end with 2: argparse does that.
"""

import sys
from collections.abc import Callable

from encoding.errors import ClozeError

__all__ = ["run"]


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and give the exit code, its own or 0; a ClozeError becomes one line on stderr, no traceback."""
    try:
        return main() or 0
    except ClozeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
