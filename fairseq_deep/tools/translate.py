"""translate raw text with a trained model

Input and output are raw text with the same number of lines, in files or standard streams. Lines are tokenised, split
into sub-words, translated with beam search, joined and detokenised. With --line-by-line, each line is translated before
the next one is read, so the process can serve another program.
"""

import argparse
import glob
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.input_text import read_lines, stdin
from fairseq_deep.tools.output_files import check_outputs, replacing

CHUNK = 2000  # number of lines sorted by length together
SEARCH = ("beam", "lenpen", "max_len_a", "max_len_b")
SUB_WORDS = {"subword-nmt": re.compile("@@( |$)"), "sentencepiece": re.compile("\u2581")}  # marks in text


def number(text: str) -> float:
    """Parse an argument: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not '{text}'")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add models, input and output, the search, and the parts of a single checkpoint."""
    kinds = "run, package, checkpoint, or directory for CTranslate2 or transformers; several form an ensemble"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=kinds)
    parser.add_argument("--input", default="-", metavar="FILE",
                        help="UTF-8 text, one sentence per line, plain or .gz (default: stdin)")  # fmt: skip
    parser.add_argument("--output", default="-", metavar="FILE", help="file for the translations (default: stdout)")
    parser.add_argument("--json", action="store_true",
                        help="write JSON lines: line, source, translations (text and score)")  # fmt: skip
    parser.add_argument("--nbest", type=at_least_one, default=1, metavar="N",
                        help="with --json: number of hypotheses per line (default: 1)")  # fmt: skip
    parser.add_argument("--line-by-line", action="store_true",
                        help="translate each line immediately, as on a terminal")  # fmt: skip
    add_search(parser)
    add_parts(parser)


def add_search(parser: argparse.ArgumentParser, beam: int | None = None) -> None:
    """Add the flags of beam search and batches; *beam* None: the recipe's."""
    search = parser.add_argument_group("search")
    usual = "the recipe's, or 4" if beam is None else beam
    search.add_argument("--beam", type=at_least_one, metavar="N", default=beam, help=f"beam width (default: {usual})")
    search.add_argument("--lenpen", type=number, metavar="A", help="length penalty (default: the recipe's, or 0.6)")
    search.add_argument(
        "--gnmt-lenpen", action="store_true", default=None,
        help="use GNMT's length penalty, ((5 + length) / 6)^A (default: as in the recipe)",
    )  # fmt: skip
    search.add_argument("--max-len-a", type=number, metavar="A",
                        help="maximum output length A x source + B, in tokens (default: the recipe's, or 1.0)")
    search.add_argument("--max-len-b", type=at_least_one, metavar="B",
                        help="B of the maximum output length (default: the recipe's, or 50)")  # fmt: skip
    search.add_argument("--decode-precision", choices=("fp32", "bf16", "int8"), default="fp32",
                        help="precision of linear layers on a CPU (default: fp32)")  # fmt: skip
    search.add_argument("--batch-size", type=at_least_one, default=64, metavar="N",
                        help="sentences per batch (default: 64)")  # fmt: skip
    search.add_argument("--max-tokens", type=at_least_one, default=4000, metavar="N",
                        help="tokens per batch (default: 4000)")  # fmt: skip
    search.add_argument("--cpu", action="store_true", help="do not use a GPU")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Add the options of `find_bundle` for a single checkpoint."""
    parts = parser.add_argument_group("settings of a single checkpoint")
    parts.add_argument("--data", metavar="DIR",
                       help="directory with dict.SRC.txt and dict.TGT.txt (default: the checkpoint's)")  # fmt: skip
    parts.add_argument("--bpe-codes", metavar="FILE",
                       help="subword-nmt merges, or SentencePiece model (default: 'code', 'bpecodes' or 'spm.model')")
    parts.add_argument("--tokenizer", choices=("moses", "none"),
                       help="tokenizer of raw text (default: moses; none with SentencePiece)")  # fmt: skip
    parts.add_argument("--lowercase", action="store_true", default=None, help="lowercase the source")
    parts.add_argument("-s", "--source-lang", metavar="SRC",
                       help="source language (default: from the checkpoint or file names)")  # fmt: skip
    parts.add_argument("-t", "--target-lang", metavar="TGT",
                       help="target language (default: from the checkpoint or file names)")  # fmt: skip


def find_parts(path: str, args: argparse.Namespace) -> Any:
    """Return the `Bundle` of the model at *path*, with the options of `add_parts` and ``--gnmt-lenpen``."""
    from fairseq_deep.runtime import find_bundle

    names = ("data", "tokenizer", "lowercase", "source_lang", "target_lang", "gnmt_lenpen")
    return find_bundle(path, codes=args.bpe_codes, **{name: getattr(args, name, None) for name in names})


def run(args: argparse.Namespace) -> int:
    """Translate; return 1 if a line was too long."""
    if args.nbest > 1 and not args.json:
        raise UsageError(f"--nbest {args.nbest} gives several translations per line: add --json")
    bundles = [find_parts(path, args) for path in args.models]
    if args.output != "-":
        check_outputs([args.output], [args.input, args.data, args.bpe_codes, *args.models, *parts_of(bundles)])
    lines = None if args.input == "-" else read_lines(args.input, may_be_empty=True)
    stay = args.input == "-" and stdin().isatty() or args.line_by_line
    translator = load(args, bundles, 1 if stay else os.cpu_count() or 1)
    chunks = split(lines if lines is not None else stdin_lines(), 1 if stay else CHUNK)
    total = len(lines) if lines is not None else 0
    if args.output == "-":
        if (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8"):  # output is UTF-8 in all locales, like input
            sys.stdout.reconfigure(encoding="utf-8")
        return write(args, translator, chunks, sys.stdout, Progress(None if sys.stdout.isatty() else total))
    with replacing(args.output) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        return write(args, translator, chunks, file, Progress(total))


def parts_of(bundles: list[Any]) -> list[str]:
    """Return the files of models: checkpoints, merges, dictionaries, and settings of text preparation."""
    parts = []
    for bundle in bundles:
        folder = os.path.dirname(bundle.checkpoint)
        parts += [bundle.checkpoint, *filter(None, [bundle.codes]), os.path.join(folder, "steps.json")]
        parts += glob.glob(os.path.join(glob.escape(bundle.data), "dict.*.txt"))
    return parts


def load(args: argparse.Namespace, bundles: list[Any], parallel: int = 1, **more: Any) -> Any:
    """Return the `Translator` of the models.

    Args:
        parallel: number of batches that may be translated at once
        more: further search options
    """
    from fairseq_deep.runtime import Translator, search_of

    asked = {name: getattr(args, name) for name in SEARCH if getattr(args, name) is not None}
    search = {**search_of(bundles[0]), **asked, **more}
    if args.nbest > search["beam"]:
        raise UsageError(f"--nbest {args.nbest} exceeds --beam {search['beam']}: choose a larger beam")
    return Translator(bundles, args.decode_precision, args.batch_size, args.max_tokens, args.cpu, args.nbest,
                      parallel, **search)  # fmt: skip


def note(text: str) -> None:
    """Write *text* to stderr."""
    print(f"fairseq-deep translate: {printable(text, None)}", file=sys.stderr)


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they arrive."""
    count = 0
    try:
        for line in stdin():
            count += 1
            yield line.decode("utf-8-sig" if count == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"line {count} of stdin is not UTF-8; decompress it, or convert it with iconv") from error
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from error


def split(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield chunks of *size* lines."""
    chunk: list[str] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class Progress:
    """Progress line on a terminal; nothing is shown if *total* is None."""

    def __init__(self, total: int | None):
        self.total, self.begun, self.done = total, time.time(), 0
        self.shown = total is not None and sys.stderr.isatty()

    def add(self, lines: int) -> None:
        """Show that a batch of *lines* is translated."""
        self.show(self.done + lines)

    def show(self, done: int) -> None:
        """Show the number of translated lines."""
        self.done = done
        if self.shown:
            of = f" of {self.total:,}" if self.total else ""
            pace = done / max(time.time() - self.begun, 1e-3)
            print(f"\r{done:,}{of} lines, {pace:,.0f} per second ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the progress line."""
        if self.shown:
            print(file=sys.stderr)


def write(
    args: argparse.Namespace, translator: Any, chunks: Iterator[list[str]], stream: TextIO, progress: Progress
) -> int:
    """Write the translations of *chunks*, and return the exit code."""
    done = failed = cut = 0
    translator.on_batch = progress.add
    if translator.text.doubt:
        note(f"warning: {translator.text.doubt}")
    mark = SUB_WORDS.get(translator.text.kind)
    try:
        for chunk in chunks:
            for source, found in zip(chunk, translator.translate_nbest(chunk)):
                done += 1
                cut += mark is not None and mark.search(source) is not None
                if not found:
                    failed += 1
                    problem = f"line {done} has more tokens than the model's {translator.max_source} positions"
                    note(f"{problem}: its translation is empty; split it")
                print(as_json(done, source, found) if args.json else found[0].text if found else "", file=stream)
            stream.flush()
            progress.show(done)
    finally:
        progress.end()
    if 2 * translator.unknown > translator.tokens:
        found = f"{translator.unknown:,} of {translator.tokens:,} tokens of the text are unknown to the model"
        note(f"warning: {found}; check the text's language, the dictionaries and the sub-words")
    if 10 * cut > done:
        note(f"warning: {cut:,} of {done:,} lines are in sub-words already, and were split again; give raw text")
    return 1 if failed else 0


def as_json(line: int, source: str, found: Sequence[Any]) -> str:
    """Format a JSON line."""
    translations = [{"text": each.text, "score": round(each.score, 4)} for each in found]
    return json.dumps({"line": line, "source": source, "translations": translations}, ensure_ascii=False)
