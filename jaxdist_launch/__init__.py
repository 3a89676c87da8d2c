"""The launcher: several processes of one script on this machine, started together and ended together.

It lies beside `jaxdist`, whose import starts JAX: a launcher imports the standard library alone, is there at once and
outlives what it starts.
"""

from .job import WorkerLost as WorkerLost
from .job import launch as launch
