"""Rules whose workers share a collective."""
