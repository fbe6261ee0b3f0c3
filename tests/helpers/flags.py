"""Flags as fairseq-train reads them, and what it says of wrong ones."""

from fairseq import options


def parse(*flags):
    """What fairseq-train makes of a command line."""
    return options.parse_args_and_arch(options.get_training_parser(), input_args=["data", *flags])


def one_line(error):
    """The message of a usage error that ``pytest.raises`` has caught."""
    text = error.value.one_line
    assert text.startswith("fairseq_deep: ")
    assert "\n" not in text
    return text
