"""`python -m jaxdist_launch` is `jaxdist launch`."""

import sys

from .command import main

sys.exit(main(sys.argv[1:]))
