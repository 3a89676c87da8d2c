"""Top-k: the entries of largest magnitude in an array.

`examples/from_scratch/top_k.py` is the method, with error feedback, in 100 lines of plain JAX.
"""

from functools import partial
from typing import Literal

from .._core.descriptions import with_description
from .._core.types import Array, PRNGKeyArray
from .compressor import Compressor
from .largest import largest_by_sorting, largest_by_threshold
from .sparse import SparsePayload, add, check_density, decompress, gather_entries, num_kept, share_kept

Method = Literal["threshold", "exact"]


@with_description
def top_k(density: float, *, method: Method = "threshold") -> Compressor:
    """Keeps the entries of largest magnitude: `C(x)_i = x_i` for the k largest `|x_i|`, else 0.

    `k = max(1, round(density d))`, δ = k/d (attained where all magnitudes are equal), and much larger for gradients,
    whose magnitudes are uneven. Biased: without error feedback the small entries are never sent. Ties go to the lower
    index; magnitudes are compared in float32.

    *On the wire*: k values in the dtype of x, and their positions: `k b + k + ((d - k) >> b)` bits with the best b
    (near `log2(d / k)`; both parts in whole bytes), up to a density of 0.5 at most 0.56 bits an entry above the entropy
    of k positions; or 2 bytes each (up to 65,536 entries) or 4 where that is smaller. At a density of 0.01 that is 1
    byte.

    Args:
      density: the share that is kept, in (0, 1]. Start at 0.01; 0.001 with a warm-up; above 0.25 an 8-bit code
        is both smaller and more exact. Workers keep different entries, so W workers receive up to W k of them.
      method: "threshold" counts the entries above a threshold, which a sample of the array suggests; "exact" is
        `lax.top_k`, the reference for the same entries, many times slower.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = top_k(0.5), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      Stich et al., "Sparsified SGD with memory", arXiv:1809.07599, 2018.
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
      Training", arXiv:1712.01887, 2017 (a threshold from a sample).
    """
    check_density(density)
    if method not in ("threshold", "exact"):
        raise ValueError(f'method must be "threshold" or "exact", got {method!r}')
    find_largest = largest_by_sorting if method == "exact" else largest_by_threshold

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        flat = x.reshape(-1)
        return gather_entries(flat, find_largest(flat, num_kept(density, flat.size)))

    return Compressor(compress, decompress, contraction=partial(share_kept, density), add=add)
