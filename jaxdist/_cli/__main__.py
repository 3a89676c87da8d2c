"""`python -m jaxdist._cli` is `jaxdist`."""

import sys

from .main import main

sys.exit(main())
