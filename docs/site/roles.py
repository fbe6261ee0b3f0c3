"""Docstrings are plain text with a few roles of reStructuredText; the pages of the site are Markdown."""

import re

from griffe import Extension


def each_by_itself(entry):
    """`a, b: text` as two entries, which is how attributes are told apart."""
    return "\n".join(f"{entry[1]}{name}: {entry[3]}" for name in entry[2].split(", "))


class Roles(Extension):
    """Write ``:class:`~package.Name``` as code, and take the marks of literal blocks away: they are indented anyhow."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = re.sub(r":[a-z]+:`[~.]*(?:[a-z_]+\.)*([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"(?m)^::\n", "", text)
            text, mark, attributes = re.sub(r"::(\n\n +)", r":\1", text).partition("Attributes:\n")
            attributes = re.sub(r"(?m)^( +)(\w+(?:, \w+)+): (.*)$", each_by_itself, attributes)
            obj.docstring.value = text + mark + attributes
