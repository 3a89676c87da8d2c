"""Training runs: the step of one worker, the loop, offloading, and suites of runs."""
