"""Communication hidden behind computation: deferred reductions (`pipelined`) and two waves at once (`wavelet`).

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .layer_passes import Layered as Layered
from .pipelined import Pipelined as Pipelined
from .pipelined import PipelinedState as PipelinedState
from .pipelined import pipelined as pipelined
from .wavelet import Wave as Wave
from .wavelet import Wavelet as Wavelet
from .wavelet import WaveletState as WaveletState
from .wavelet import wavelet as wavelet
