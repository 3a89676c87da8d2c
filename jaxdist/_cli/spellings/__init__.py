"""Command-line spellings and the objects they stand for."""
