"""Reads text line by line. Only LF ends a line, so both sides of a pair always have the same lines.

A CR before LF and a byte order mark at the start of a file are not part of the text. All other characters that some
readers treat as line ends (CR, VT, FF, FS, GS, RS, NEL, LS, PS) are white space between tokens.
"""

import contextlib
import os
import sys

from fairseq.file_io import PathManager
from fairseq.safe_exit import OneLineError


class TextError(OneLineError):
    """Text that cannot be read, or sides with different numbers of lines."""


def lines(path, start=0, end=0):
    """Yield the lines of a UTF-8 file without their ends.

    Args:
        path: the file; "-" is the standard input
        start: position of the first line, in bytes
        end: position after the last line, in bytes; 0 or less: the end of the file

    Raises:
        TextError: the file cannot be read or is not UTF-8
    """
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as stream:
            position = stream.seek(start) if start else 0
            for number, line in enumerate(iter(stream.readline, b""), 1):
                if 0 < end < position + len(line):
                    return
                try:
                    text = line.decode("utf-8" if position else "utf-8-sig")
                except UnicodeDecodeError:
                    place = "" if start else f", line {number}"
                    raise TextError(f"{path}{place}: not UTF-8; convert the file with iconv") from None
                position += len(line)
                yield text.removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror}); correct the path") from None


@contextlib.contextmanager
def Chunker(path, start_offset=0, end_offset=0):
    """Context manager that yields :func:`lines`."""
    yield lines(path, start_offset, end_offset)


def find_offsets(filename, num_chunks):
    """Return `num_chunks` + 1 positions of line starts that divide a file into chunks of similar size."""
    with open(filename, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        offsets = [0]
        for chunk in range(1, num_chunks):
            stream.seek(size // num_chunks * chunk)
            stream.readline()
            offsets.append(stream.tell())
        return [*offsets, size]


def check_same(counts):
    """Reject files with different numbers of lines, which would pair the wrong sentences.

    Args:
        counts: {name: number of lines}

    Raises:
        TextError: the numbers differ
    """
    if len(set(counts.values())) > 1:
        found = " and ".join(f"{count:,}" for count in counts.values())
        raise TextError(
            f"{' and '.join(counts)}: the numbers of sentences must be equal ({found}); use aligned text, "
            "in which only LF ends a line"
        )


def read_system(path, reference):
    """Return the lines of a translation that has as many lines as the file `reference`."""
    found = list(lines(path))
    check_same({path: len(found), reference: sum(1 for _ in lines(reference))})
    return found


def check_texts(args):
    """Read all text that fairseq-preprocess is about to binarise, before it writes anything.

    Raises:
        TextError: a file cannot be read, or files of a pair have different numbers of lines
    """
    languages = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
    others = [] if args.dict_only else [args.validpref, args.testpref]
    for prefix in filter(None, [args.trainpref, *(prefix for each in others for prefix in (each or "").split(","))]):
        names = [f"{prefix}.{language}" if language else prefix for language in languages]
        aligned = f"{prefix}.{args.align_suffix}"
        names += [aligned] if args.align_suffix and os.path.exists(aligned) else []
        names += [args.alignfile] if args.alignfile and prefix == args.trainpref else []
        counts = {name: sum(1 for _ in lines(PathManager.get_local_path(name))) for name in names}
        if not args.dict_only:
            check_same(counts)
