"""`python -m cloze COMMAND`: the command `cloze`."""

import sys

from cloze.command import main

sys.exit(main())
