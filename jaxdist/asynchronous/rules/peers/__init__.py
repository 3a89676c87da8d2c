"""Rules in which workers exchange models with their neighbors."""
