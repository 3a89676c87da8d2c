"""Tiles for flax models as they are: their `Dense` layers find tiled kernels among the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import AxisNames
from .tiled import tiled_dense
from .tiles import Tiled


def tiled_layers(*, axis: AxisNames = "data", remat: bool = True) -> Callable[..., Any]:
    """An interceptor for `flax.linen`: every `Dense` layer whose kernel is `Tiled` is computed by `tiled_dense`.

    Args:
      axis: the mesh axis of the workers.
      remat: as for `tiled_dense`.

    Returns:
      What `flax.linen.intercept_methods` takes. The other layers run as they are; they must not be marked.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxdist import offload
      >>> model, x = nn.Dense(6), jnp.ones((2, 4))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> tiled = params | {"kernel": offload.tile(params["kernel"], out_splits=3)}
      >>> with nn.intercept_methods(offload.tiled_layers()):
      ...     y = model.apply({"params": tiled}, x)
      >>> bool(jnp.allclose(y, model.apply({"params": params}, x), atol=1e-6))
      True

    References:
      Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", arXiv
      2104.07857, 2021 (memory-centric tiling).
    """
    import flax.linen as nn  # an optional dependency, and whoever calls this has it

    def interceptor(layer, args, kwargs, context):
        module = context.module
        if isinstance(module, nn.Dense) and context.method_name == "__call__" and not module.is_initializing():
            kernel = module.get_variable("params", "kernel")
            if isinstance(kernel, Tiled):
                bias = module.get_variable("params", "bias") if module.use_bias else None
                (x,), dtype = args, module.dtype or jnp.result_type(*args, *jax.tree.leaves((kernel, bias)))
                # A piece is cast before it is gathered: half precision is half the bytes.
                x, kernel, bias = jax.tree.map(lambda leaf: leaf.astype(dtype), (x, kernel, bias))
                return tiled_dense(x, kernel, bias, axis=axis, remat=remat)
        return layer(*args, **kwargs)

    return interceptor
