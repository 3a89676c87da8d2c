"""Trees on the wire: flat buffers, shards, encoded payloads and averages over neighbors."""
