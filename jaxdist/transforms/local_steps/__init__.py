"""Workers step by themselves and meet every `H` steps: Local SGD, SlowMo, DiLoCo, streaming."""

from .base import local_steps as local_steps
from .fragments import Fragments as Fragments
from .fragments import balanced as balanced
from .fragments import strided as strided
from .outer import slow_momentum as slow_momentum
from .pulled import pulled as pulled
from .rounds import due_fragments as due_fragments
from .state import LocalStepsState as LocalStepsState
from .state import anchor as anchor
