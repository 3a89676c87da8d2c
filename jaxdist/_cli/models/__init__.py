"""The models and data sets that the commands, examples and benchmarks train."""
