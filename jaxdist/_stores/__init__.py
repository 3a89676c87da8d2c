"""Named bytes that several jobs share, in a folder or a bucket: private, the base of `checkpoint` and `islands`."""
