"""The checks of laws by which the library tests its compressors and reducers, and `expect` for what a program sends.

A failed check raises `AssertionError` with a message that names it.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .compressor_laws import assert_codec_laws as assert_codec_laws
from .compressor_laws import assert_compressor_laws as assert_compressor_laws
from .expectations import expect as expect
from .geometry_laws import assert_geometry_laws as assert_geometry_laws
from .reducer_laws import assert_reducer_laws as assert_reducer_laws
