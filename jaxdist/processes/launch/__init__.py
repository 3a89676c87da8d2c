"""Starts and restarts the processes of a job, using only the standard library."""

from .job import ProcessFailedError as ProcessFailedError
from .job import launch as launch
