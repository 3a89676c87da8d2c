"""The launcher: several processes of one script on this machine, started together and ended together.

It needs the standard library alone.
"""

from .job import WorkerLost as WorkerLost
from .job import launch as launch
