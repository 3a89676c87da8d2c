"""Communication hidden behind computation."""

from .pipelined import Pipelined as Pipelined
from .pipelined import PipelinedState as PipelinedState
from .pipelined import pipelined as pipelined
from .rolling import Wave as Wave
from .rolling import Wavelet as Wavelet
from .rolling import WaveletState as WaveletState
from .wavelet import Layered as Layered
from .wavelet import wavelet as wavelet
