"""Where tests find the repository and the scripts that they start."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
