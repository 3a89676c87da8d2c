"""How `host` runs an update, in the order of what happens: `flatten` its trace, `place` the operations, `run` them."""
