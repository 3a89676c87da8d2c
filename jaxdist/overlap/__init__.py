"""Communication hidden behind computation: deferred reductions (`pipelined`) and two waves at once (`wavelet`)."""

from .pipelined import Pipelined as Pipelined
from .pipelined import PipelinedState as PipelinedState
from .pipelined import pipelined as pipelined
from .rolling_waves import Wave as Wave
from .rolling_waves import Wavelet as Wavelet
from .rolling_waves import WaveletState as WaveletState
from .wave_model import Layered as Layered
from .wavelet import wavelet as wavelet
