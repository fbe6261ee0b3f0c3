"""Comparison of systems trained under equal conditions, with a table and a picture."""
