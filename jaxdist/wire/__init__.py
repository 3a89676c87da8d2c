"""Trees on the wire: flat buffers, shards, low-rank factors, encoded payloads and averages over neighbors."""
