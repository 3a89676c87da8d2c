"""The memory that the compiler plans for a program."""

from typing import NamedTuple

import jax

from .hlo_reader import compile_lowered


class Memory(NamedTuple):
    """The bytes that the compiler plans for a program on one device.

    Attributes:
      arguments: the arguments.
      outputs: the results, including those that reuse a donated argument.
      temporary: buffers that exist only while the program runs.
      aliased: the part of `outputs` that reuses donated arguments.
      generated_code: the program itself.
      host_arguments, host_outputs, host_temporary, host_aliased: the same in the host's memory.
      peak: `arguments + outputs + temporary - aliased`, the most device memory in use at one time.
    """

    arguments: int
    outputs: int
    temporary: int
    aliased: int
    generated_code: int
    host_arguments: int
    host_outputs: int
    host_temporary: int
    host_aliased: int
    peak: int

    def __str__(self) -> str:
        """A table in MB (10^6 bytes)."""
        kinds = "arguments", "outputs", "temporary", "aliased"
        rows = [(kind, getattr(self, kind), getattr(self, f"host_{kind}")) for kind in kinds]
        host_peak = self.host_arguments + self.host_outputs + self.host_temporary - self.host_aliased
        rows += [("peak", self.peak, host_peak)]
        lines = [f"{name:9} {device / 1e6:11,.3f} {host / 1e6:11,.3f}" for name, device, host in rows]
        return "\n".join(["            device MB     host MB", *lines])


def memory(program: jax.stages.Compiled | jax.stages.Lowered) -> Memory:
    """Returns the memory that one device needs for a program, by the compiler's plan; compiles a lowered one.

    `peak` is computed here because the field that XLA calls peak leaves out the temporary buffers on CPU.

    Accuracy:

    - `arguments`, `outputs`, `aliased` are exact on every backend, as is `temporary` on GPU and TPU. On CPU
      `temporary` came within about 5 % of the growth of the process in our measurements. It does not contain the
      memory of the runtime: gloo's buffers, the thread pool, the allocator's slack.
    - On CPU "host" and "device" are the same memory, so XLA counts arguments in `pinned_host` as device arguments and
      all `host_` fields stay 0. To see what offloading would save there, sum the bytes of the arrays whose
      `sharding.memory_kind` is `pinned_host`, or compile ahead of time for a TPU or GPU.
    - Rematerialization written as `jax.checkpoint` in unrolled code shows no saving on CPU under JAX 0.10, where XLA
      drops the barriers around it; inside `lax.scan`, and on newer versions, it does.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> plan = memory(jax.jit(lambda x: x + 1).lower(jnp.ones(256)))
      >>> plan.arguments, plan.outputs, plan.peak
      (1024, 1024, 2048)
      >>> print(plan)
                  device MB     host MB
      arguments       0.001       0.000
      outputs         0.001       0.000
      temporary       0.000       0.000
      aliased         0.000       0.000
      peak            0.002       0.000
    """
    stats = compile_lowered(program).memory_analysis()
    if stats is None:
        raise ValueError(
            "this backend does not report the memory of its compiled programs; compile for another platform"
        )
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporary, aliased = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    return Memory(
        arguments=arguments,
        outputs=outputs,
        temporary=temporary,
        aliased=aliased,
        generated_code=stats.generated_code_size_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_outputs=stats.host_output_size_in_bytes,
        host_temporary=stats.host_temp_size_in_bytes,
        host_aliased=stats.host_alias_size_in_bytes,
        peak=arguments + outputs + temporary - aliased,
    )
