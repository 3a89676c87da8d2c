"""Helpers that know nothing of distribution: types, trees, dtypes, checks, hashes and jaxprs."""
