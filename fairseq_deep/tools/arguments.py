"""Types of arguments."""

import argparse


def at_least_one(text: str) -> int:
    """Parse an argument: a whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)
