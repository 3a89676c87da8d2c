"""A reader of compiled HLO, and a schedule simulator on top of it."""
