"""The `jaxdist` command, and the models, runs, plots and tables that examples and benchmarks share with it.

The models need the extra `train` (flax, orbax, scikit-learn), the command and its plots the extra `cli` as well. Import
the module that you want: `from jaxdist._cli.models import text`.
"""
