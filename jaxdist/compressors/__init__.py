"""One array to a payload and back: what crosses the network, with no state and no collective.

A compressor that states a variance ω is unbiased, one that states a contraction δ is biased and needs error feedback.
Payloads are gathered and decoded one by one, except those of a `summable` compressor, which an all-reduce averages.
Arithmetic is float32 whatever the dtype, and a block or bucket with NaN or infinity decodes to such entries, unless a
docstring says otherwise.
"""

from .adapt_levels import optimal_levels as optimal_levels
from .block_top_k import block_top_k as block_top_k
from .cast import cast as cast
from .chained import chained as chained
from .compressor import Codec as Codec
from .compressor import Compressor as Compressor
from .compressor import DamagedCodeError as DamagedCodeError
from .drive import drive as drive
from .dynamic_fp8 import dynamic_fp8 as dynamic_fp8
from .e3m0 import e3m0 as e3m0
from .fp8 import fp8 as fp8
from .gspar import closed_form_probabilities as closed_form_probabilities
from .gspar import expected_bits as expected_bits
from .gspar import gspar as gspar
from .identity import identity as identity
from .int4 import int4 as int4
from .int8 import int8 as int8
from .levels import expected_variance as expected_variance
from .levels import with_levels as with_levels
from .min_max_uint8 import min_max_uint8 as min_max_uint8
from .mxfp4 import mxfp4 as mxfp4
from .mxfp8 import mxfp8 as mxfp8
from .natural import natural as natural
from .nuqsgd import nuqsgd as nuqsgd
from .one_bit import one_bit as one_bit
from .packing import bytes_of_codes as bytes_of_codes
from .packing import from_words as from_words
from .packing import pack as pack
from .packing import to_words as to_words
from .packing import unpack as unpack
from .qsgd import qsgd as qsgd
from .random import Noise as Noise
from .random import uniform_hash as uniform_hash
from .random_k import random_k as random_k
from .scaled import scaled as scaled
from .scaled_sign import scaled_sign as scaled_sign
from .sign import sign as sign
from .terngrad import terngrad as terngrad
from .top_k import top_k as top_k
from .two_means import two_means as two_means
