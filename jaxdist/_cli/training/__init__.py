"""Training runs of the command line and of the benchmarks."""
