"""Reads compiled HLO: its instructions, their cost, and the trip counts of loops."""
