"""Starts and restarts the processes of a job, using only the standard library."""

from .failures import NodeLostError as NodeLostError
from .failures import ProcessFailedError as ProcessFailedError
from .job import launch as launch
