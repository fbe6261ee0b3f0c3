"""Flags as fairseq-train reads them."""

from fairseq import options


def parse(*flags):
    """What fairseq-train makes of a command line."""
    return options.parse_args_and_arch(options.get_training_parser(), input_args=["data", *flags])
