"""Durations of gradients: each worker draws from its own random stream, which is the same under every rule."""

from .base import Durations as Durations
from .base import failures as failures
from .base import outages as outages
from .base import stream as stream
from .laws import constant as constant
from .laws import exponential as exponential
from .laws import from_file as from_file
from .laws import lognormal as lognormal
from .laws import power as power
from .laws import recorded as recorded
from .laws import shifted_exponential as shifted_exponential
from .slow import markov as markov
from .slow import one_slow as one_slow
from .slow import random_slow as random_slow
