"""Scores of anything that embeds: suites, their figures, comparisons and reports. Needs the extra `train`."""

import sys

from encoding.command import end_in_one_line

if sys.argv[:1] == ["-m"]:  # so it is while Python locates the module of `python -m evaluation.NAME`
    sys.excepthook = end_in_one_line
