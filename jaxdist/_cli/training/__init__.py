"""Training runs: one worker, sharded, offloaded, and series of them."""
