"""BAGUA's four primitives and its six algorithms, each a composition of a few lines."""

from .centralized import bytegrad as bytegrad
from .centralized import gradient_allreduce as gradient_allreduce
from .centralized import qadam as qadam
from .decentralized import async_model_average as async_model_average
from .decentralized import decentralized as decentralized
from .decentralized import low_precision_decentralized as low_precision_decentralized
from .primitives import c_fp_s as c_fp_s
from .primitives import c_lp_s as c_lp_s
from .primitives import d_fp_s as d_fp_s
from .primitives import d_lp_s as d_lp_s
