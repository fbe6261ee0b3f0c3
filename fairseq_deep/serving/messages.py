"""Parsing and validation of translation requests in LibreTranslate's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from typing import Any
from urllib.parse import parse_qsl

from fairseq_deep.errors import one_line, printable
from fairseq_deep.runtime.records import Check, check, needed, one_of, optional, parse, text, whole

from .batching import Pair

MOST_ALTERNATIVES = 100
_code = needed(text("(?s).*", "the code of a language"))
FIELDS = {
    "q": needed(Check("a string or a list of strings", lambda q: all(isinstance(each, str) for each in q)
                      if isinstance(q, list) else isinstance(q, str))),
    "source": _code, "target": _code, "format": optional(one_of("text")),
    "alternatives": optional(whole(0, MOST_ALTERNATIVES)),
}  # fmt: skip
"""The schema of a request."""
FORM, JSON, MULTIPART = "application/x-www-form-urlencoded", "application/json", "multipart/form-data"


class Refused(Exception):
    """A request is rejected with an error response.

    Args:
        status: HTTP status
        message: the reason
        headers: headers of the response
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        body: size of the body, in bytes
        characters: characters in all texts together
        lines: lines in all texts together; the model translates each line as a sentence
        timeout: seconds from arrival to answer
        body_timeout: seconds until the body must have arrived
    """

    body: int = 1 << 20
    characters: int = 10_000
    lines: int = 200
    timeout: float = 60.0
    body_timeout: float = 10.0


@dataclass(frozen=True)
class Question:
    """The content of a request.

    Attributes:
        texts: raw texts
        single: whether the client gave one text instead of a list
        pair: languages
        alternatives: maximum number of alternatives per text
    """

    texts: Sequence[str]
    single: bool
    pair: Pair
    alternatives: int

    @property
    def lines(self) -> list[list[str]]:
        """The lines of each text."""
        return [text.split("\n") for text in self.texts]


def read_fields(content_type: str, body: bytes) -> dict[str, Any]:
    """Parse the fields of a JSON object or a form of one of both kinds.

    Raises:
        Refused: *body* is neither
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == JSON:
            found = parse(body.decode())
        elif kind == MULTIPART:
            found = _of_form(_parts(content_type, body))
        elif kind == FORM:
            found = _of_form(parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=1000))
        else:
            raise Refused(415, f"Content-Type must be {JSON}, {FORM} or {MULTIPART}")
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body must be UTF-8 ({error.reason})") from error
    except ValueError as error:
        raise Refused(400, f"the body cannot be read: {one_line(error, 150)}") from error
    if not isinstance(found, dict):
        raise Refused(400, "the body must be a JSON object")
    return found


def _parts(content_type: str, body: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a form that a page's ``FormData`` sends.

    Raises:
        ValueError: *body* is not such a form
    """
    parse_head = BytesHeaderParser().parsebytes
    boundary = parse_head(b"Content-Type: " + content_type.encode("latin-1")).get_boundary()
    pieces = (b"\r\n" + body).split(b"\r\n--" + (boundary or "").encode("latin-1"), 1002)
    if not boundary or not 2 <= len(pieces) <= 1002 or not pieces[-1].startswith(b"--"):
        raise ValueError("not a form with a boundary and at most 1,000 parts")
    found = []
    for piece in pieces[1:-1]:
        head, _, value = piece.partition(b"\r\n\r\n")
        found.append((parse_head(head.lstrip()).get_param("name", header="content-disposition"), value.decode()))
    if not all(isinstance(name, str) for name, _ in found):
        raise ValueError("a part has no name")
    return found


def _of_form(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return fields by name; several texts become a list, and the number of alternatives becomes an integer."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name == "q" and "q" in found:
            found["q"] = [*([found["q"]] if isinstance(found["q"], str) else found["q"]), value]
        else:
            found.setdefault(name, value)
    count = found.get("alternatives")
    if count is not None and count.isascii() and count.isdigit() and len(count) < 10:
        found["alternatives"] = int(count)
    return found


def read_question(fields: dict[str, Any], pairs: Collection[Pair], limits: Limits) -> Question:
    """Convert *fields* to a question.

    Raises:
        Refused: a field is missing or invalid, or a limit is exceeded
    """
    try:
        check(fields, FIELDS)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    given = fields["q"]
    texts = [given] if isinstance(given, str) else given
    _check_sizes(texts, limits)
    return Question(texts, isinstance(given, str), _pair(fields, pairs), fields.get("alternatives") or 0)


def _check_sizes(texts: list[str], limits: Limits) -> None:
    characters = sum(map(len, texts))
    if characters > limits.characters:
        raise Refused(400, f"q has {characters:,} characters, more than {limits.characters:,}; split it")
    lines = sum(text.count("\n") + 1 for text in texts)
    if lines > limits.lines:
        raise Refused(400, f"q has {lines:,} texts or lines, more than {limits.lines:,}; split it")


def _pair(fields: dict[str, Any], pairs: Collection[Pair]) -> Pair:
    sources = sorted({pair.source for pair in pairs})
    pair = Pair(fields["source"], fields["target"])
    if pair.source == "auto":
        raise Refused(400, f"source: languages are not detected; choose from {', '.join(sources)}")
    if pair.source not in sources:
        problem = f"source: '{printable(pair.source, 40)}' is not supported"
        raise Refused(400, f"{problem}; choose from {', '.join(sources)}")
    targets = sorted(each.target for each in pairs if each.source == pair.source)
    if pair.target not in targets:
        problem = f"target: '{printable(pair.target, 40)}' is not supported from {pair.source}"
        raise Refused(400, f"{problem}; choose from {', '.join(targets)}")
    return pair
