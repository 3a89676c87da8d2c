"""BAGUA's four primitives and its six algorithms, each a composition of a few lines."""

from .centralised import bytegrad as bytegrad
from .centralised import gradient_allreduce as gradient_allreduce
from .centralised import qadam as qadam
from .decentralised import async_model_average as async_model_average
from .decentralised import decentralized as decentralized
from .decentralised import low_precision_decentralized as low_precision_decentralized
from .primitives import c_fp_s as c_fp_s
from .primitives import c_lp_s as c_lp_s
from .primitives import d_fp_s as d_fp_s
from .primitives import d_lp_s as d_lp_s
