"""The checks of laws by which the library tests its compressors and reducers, for use with yours.

A failed law raises `AssertionError` with a message that names it.
"""

from .._core.suggestions import suggest_names as _suggest_names
from .compressor_laws import assert_codec_laws as assert_codec_laws
from .compressor_laws import assert_compressor_laws as assert_compressor_laws
from .geometry_laws import assert_geometry_laws as assert_geometry_laws
from .reducer_laws import assert_reducer_laws as assert_reducer_laws

# Not imported with the package.
_suggest_names(__name__)
