"""Starts and restarts the processes of a job, using only the standard library."""

from .job import ProcessFailed as ProcessFailed
from .job import launch as launch
