"""The spellings of reducers, optimizers, methods, models and rules on a command line."""
