"""Starts and restarts the processes of a job, with the standard library alone."""

from .job import WorkerLost as WorkerLost
from .job import launch as launch
