"""One array to a payload and back: what crosses the network, with no state and no collective.

A compressor that states a variance ω is unbiased, one that states a contraction δ is biased and needs error feedback.
Payloads are gathered and decoded one by one, except those of a `summable` compressor, which an all-reduce averages.
Arithmetic is float32 whatever the dtype, and a block or bucket with NaN or infinity decodes to such entries, unless a
docstring says otherwise.
"""

from .adapt_levels import optimal_levels as optimal_levels
from .base import Codec as Codec
from .base import Compressor as Compressor
from .base import DamagedCodeError as DamagedCodeError
from .base import chained as chained
from .base import scaled as scaled
from .block_floats import dynamic_fp8 as dynamic_fp8
from .block_floats import e3m0 as e3m0
from .block_floats import fp8 as fp8
from .block_floats import mxfp4 as mxfp4
from .block_floats import mxfp8 as mxfp8
from .blocks import int4 as int4
from .blocks import int8 as int8
from .blocks import min_max_uint8 as min_max_uint8
from .cast import cast as cast
from .cast import identity as identity
from .cast import natural as natural
from .gspar import closed_form_probabilities as closed_form_probabilities
from .gspar import expected_bits as expected_bits
from .gspar import gspar as gspar
from .levels import expected_variance as expected_variance
from .levels import nuqsgd as nuqsgd
from .levels import with_levels as with_levels
from .packing import bytes_of_codes as bytes_of_codes
from .packing import from_words as from_words
from .packing import pack as pack
from .packing import to_words as to_words
from .packing import unpack as unpack
from .qsgd import qsgd as qsgd
from .qsgd import terngrad as terngrad
from .random import Noise as Noise
from .random import uniform_hash as uniform_hash
from .sign import drive as drive
from .sign import one_bit as one_bit
from .sign import scaled_sign as scaled_sign
from .sign import sign as sign
from .sign import two_means as two_means
from .sparse import block_top_k as block_top_k
from .sparse import random_k as random_k
from .sparse import top_k as top_k
