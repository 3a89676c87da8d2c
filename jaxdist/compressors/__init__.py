"""One array to a payload and back: what crosses the network, with no state and no collective."""

from .base import Compressor as Compressor
from .cast import cast as cast
from .cast import identity as identity
from .level_variance import expected_variance as expected_variance
from .levels import nuqsgd as nuqsgd
from .levels import with_levels as with_levels
from .optimal_levels import optimal_levels as optimal_levels
from .packing import from_words as from_words
from .packing import pack as pack
from .packing import packed_size as packed_size
from .packing import to_words as to_words
from .packing import unpack as unpack
from .quantize import qsgd as qsgd
from .random import Noise as Noise
from .random import uniform_hash as uniform_hash
from .random import uniform_threefry as uniform_threefry
from .random_k import random_k as random_k
from .scaled import scaled as scaled
from .sign import scaled_sign as scaled_sign
from .sparse import top_k as top_k
