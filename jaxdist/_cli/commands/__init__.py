"""The commands of `jaxdist`, one module each."""
