"""Records: JSON files written by recipes, read with a schema.

All readers of records use this module, since a record may come from an untrusted source.

A schema is one of these:

- a `Check`: the value satisfies it;
- a dictionary: the value is an object. A name in the schema is optional, unless `needed` wraps its schema. The name
  ``"*"`` matches all others. Without it, other names are accepted and not checked, except in `exactly`;
- a list of one schema: the value is a list of such values.

Objects have no duplicate names, strings are valid Unicode, and nesting is limited to `DEEPEST` levels.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError

from .files import read_text

DEEPEST = 50
"""Maximum nesting depth of objects and lists."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{\]}]', re.DOTALL)


class Check(NamedTuple):
    """A condition on one value and its description, such as "a whole number from 1 to 1000"."""

    expected: str
    holds: Callable[[Any], bool]

    def __call__(self, value: Any) -> bool:
        return self.holds(value)


class exactly(dict[str, Any]):
    """Schema of an object with all of these names and no others."""


class needed(NamedTuple):
    """Schema of a required name in an object."""

    schema: Any


def whole(least: int, most: int) -> Check:
    """Return the check for a whole number from *least* to *most*."""
    expected = f"a whole number from {least} to {most}"
    return Check(expected, lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Check:
    """Return the check for a finite number from *least* to *most*."""
    return Check(f"a number from {least} to {most}", lambda value: is_number(value) and least <= value <= most)


def text(pattern: str, expected: str) -> Check:
    """Return the check for a string that matches *pattern* as a whole."""
    return Check(expected, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def optional(check: Check) -> Check:
    """Return the check for null or a value that satisfies *check*."""
    return Check(f"{check.expected} or null", lambda value: value is None or check(value))


def one_of(*values: Any) -> Check:
    """Return the check for one of *values*."""
    expected = "one of " + ", ".join(map(str, values)) if len(values) > 1 else str(values[0])
    return Check(expected, lambda value: isinstance(value, str) and value in values)


def is_number(value: Any) -> bool:
    """Return whether *value* is a finite number that a double represents exactly or nearly."""
    if type(value) is int:
        return abs(value) < 1 << 53
    return type(value) is float and math.isfinite(value)


def _is_figure(value: Any) -> bool:
    return type(value) is float or is_number(value)


def _is_numeral(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?(\d{1,30}(\.\d{0,30})?(e[-+]?\d{1,3})?|inf|nan)", value, re.IGNORECASE) is not None
    return _is_figure(value)


def _is_count(value: Any) -> bool:
    return _is_numeral(value) and 0 <= float(value) <= MOST


MOST = 1 << 50
"""Maximum of a count."""
truth = Check("true or false", lambda value: isinstance(value, bool))
line = text(r"[^\x00-\x1f\x7f]{0,1000}", "one line of text")
language = text(r"[A-Za-z0-9_.-]{1,32}", "a language code")
amount = whole(0, MOST)
figure = Check("a number", _is_figure)  # a measurement: NaN or Infinity if training diverged
numeral = Check("a number", _is_numeral)  # as fairseq logs it: a number, or a string with a number
count = Check("a number of at least 0", _is_count)


def parse(content: str) -> Any:
    """Return the value of the JSON text *content*.

    NaN and Infinity are accepted, since results of diverged training contain them; the checks of settings reject them.

    Raises:
        ValueError: *content* is not JSON, names are repeated, nesting is too deep, or a string is not valid Unicode
    """
    steps = ((word in "[{") - (word in "]}") for word in _STRING_OR_BRACKET.findall(content))
    if max(itertools.accumulate(steps), default=0) > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    try:
        found = json.loads(content, object_pairs_hook=once)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string has half of a surrogate pair") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {str(error)[:100]}") from None
    return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of *pairs*.

    Raises:
        ValueError: a name is repeated
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated in one object")
    return found


def check(value: Any, schema: Any, name: str = "") -> None:
    """Reject a *value* that does not match *schema*.

    Raises:
        ValueError: ``NAME is VALUE, not EXPECTED``
    """
    if isinstance(schema, needed):
        schema = schema.schema
    if isinstance(schema, dict):
        _expect(isinstance(value, dict), value, "an object", name)
        prefix = f"{name}." if name else ""
        for key, part in schema.items():
            if isinstance(part, needed if not isinstance(schema, exactly) else object) and key not in value:
                raise ValueError(f"{prefix}{key} is missing")
        for key, part in value.items():
            if isinstance(schema, exactly) and key not in schema:
                raise ValueError(f"{name or 'the content'} has the unknown setting {_short(repr(key))}")
            if key in schema or "*" in schema:
                check(part, schema[key] if key in schema else schema["*"], prefix + key)
    elif isinstance(schema, list):
        _expect(isinstance(value, list), value, "a list", name)
        for number, part in enumerate(value, 1):
            check(part, schema[0], f"{name}[{number}]")
    else:
        _expect(schema(value), value, schema.expected, name)


def _expect(holds: bool, value: Any, expected: str, name: str) -> None:
    if not holds:
        shown = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
        raise ValueError(f"{_short(name) or 'the content'} is {_short(shown)}, not {expected}")


def _short(words: str) -> str:
    plain = words.encode("unicode_escape").decode("ascii") if not words.isprintable() else words
    return plain if len(plain) <= 60 else plain[:57] + "..."


def read_json(path: str, schema: Any, cure: str) -> Any:
    """Return the content of the file, or an empty object if the file does not exist.

    Args:
        cure: a fix for the user; the error ends with it

    Raises:
        UsageError: the file is not regular, cannot be read, or does not match *schema*
    """
    if not os.path.exists(path):
        return {}
    content = read_text(path, cure)
    try:
        found = parse(content)
        check(found, schema)
    except ValueError as error:
        raise UsageError(f"{path}: {error}; {cure}") from None
    return found


def read_json_lines(path: str, schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one object per line; a missing file has none.

    Lines that are not JSON are skipped: a full disk or a power cut can truncate them.

    Raises:
        UsageError: the file cannot be read, or an object does not match *schema*
    """
    text = read_text(path, "move it elsewhere", errors="replace") if os.path.exists(path) else ""
    for place, content in enumerate(text.split("\n"), 1):
        try:
            found = parse(content)
        except ValueError:
            continue
        try:
            check(found, schema)
        except ValueError as error:
            raise UsageError(f"{path}:{place}: {error}; remove the line") from None
        yield found


CHECKPOINTS = ("averaged.pt", "checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt")
"""Checkpoints in the directory of a run; the first that exists is its model."""
RERUN = "run the recipe again with --stage 7"
"""Fix for an invalid ``RESULT.json``."""
AGAIN = "run the recipe again with --stage 6"
"""Fix for an invalid ``generated-with.json``."""
SEARCHED = "generated-with.json"
"""Search settings of a recipe's translations."""
LARGEST_NUMBER = 1_000_000
"""Maximum of sizes, positions and depths of a model."""
TOKENIZERS = ("moses", "none")
SEARCH: dict[str, Check] = {
    "beam": whole(1, 1000),
    "lenpen": number(0, 100),
    "gnmt_lenpen": truth,
    "max_len_a": number(0, 100),
    "max_len_b": whole(0, LARGEST_NUMBER),
}
STEPS = {"tokenizer": one_of(*TOKENIZERS), "lowercase": truth}
"""``steps.json``: text preparation of a recipe."""
_SIDE = needed({"score": needed(figure)})
_MEASURE = {"difference": needed(figure), "p": needed(optional(figure)), "other": _SIDE, "ours": _SIDE}
_COMPARED = {"system": line, "resamples": amount, "seed": amount, "measures": {"*": _MEASURE}}
SCORE = {"bleu": figure, "chrf": figure, "brevity_penalty": figure, "sentences": amount, "signature": line,
         "chrf_signature": line, "against": _COMPARED}  # fmt: skip
DATA = {"route": line, "sets": {"*": {"pairs": needed(amount), "sha256": needed({"*": line})}}}
_PRINTED = Check("a number, a line of text, true, false or null",
                 lambda value: value is None or truth(value) or figure(value) or line(value))  # fmt: skip
FACTS = {name: _PRINTED for name in (
    "arch", "task", "conf", "seed", "precision", "devices", "tokens_per_update", "max_tokens", "update_freq",
    "averaged", "average_updates", "hardware", "commit", "date", "smoke")}  # fmt: skip
_FIGURES = ("bleu", "chrf", "valid_ppl", "best_valid_ppl")
_MEANS = ("mean_bleu", "mean_tokenised_bleu", "tokenised_bleu", "compound_split_bleu")
RESULT = {
    **SEARCH, **FACTS, **{name: figure for name in (*_FIGURES, *_MEANS)},
    "signature": line, "updates": amount, "epochs": _PRINTED, "train_hours": figure, "parameters": optional(amount),
    "pairs": {"*": amount}, "environment": {"*": line}, "data": DATA, "scores": {"*": {"*": SCORE}},
}  # fmt: skip
"""``RESULT.json`` of a recipe's run."""
_SPREAD = {"mean": needed(figure), "std": needed(optional(figure)), "min": figure, "max": figure}
SEEDS = {"signature": line, "seeds": needed([amount]), "failed": [amount], "runs": needed({"*": RESULT}),
         **{name: _SPREAD for name in _FIGURES}}  # fmt: skip
"""``RESULT.json`` of the same run with several seeds."""
PAIRS = [Check("a pair of languages and its number of sentences",
               lambda value: isinstance(value, list) and len(value) == 2 and line(value[0]) and amount(value[1]))]
"""``pairs.json``: parts of a multilingual test set."""
LOGGED = {
    **{name: count for name in ("num_updates", "valid_num_updates")},
    **{name: numeral for name in ("loss", "ppl", "lr", "gnorm", "wps", "wpb", "ups", "valid_loss",
                                  "valid_nll_loss", "valid_ppl", "valid_best_loss")},
    **{name: optional(numeral) for name in ("ratio_enc", "ratio_dec")},  # null in an interval without a measurement
}  # fmt: skip
"""Values that fairseq logs in training and in validation."""
TRAINED = {"kind": needed(line), "time": needed(count), "session": needed(count), "commit": line,
           "epoch": _PRINTED, **LOGGED}  # fmt: skip
"""A line of ``train.jsonl``: an entry of fairseq's log, with its kind, time and session."""
