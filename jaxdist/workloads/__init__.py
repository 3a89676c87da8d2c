"""Small real models and data, and the loop that trains them: what the command line, examples and benchmarks share.

Needs the extra `train` (flax, orbax, scikit-learn); `plots` needs matplotlib, of the extra `cli`. Import the
module that you want: `from jaxdist.workloads import train, text`.
"""
