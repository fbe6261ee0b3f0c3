"""The models: torch is all that this part imports."""
