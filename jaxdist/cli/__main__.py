"""`python -m jaxdist.cli` is `jaxdist`."""

import sys

from . import main

sys.exit(main())
