"""translate raw text with a trained model

Input and output are raw text with the same number of lines, in files or standard streams. Lines are tokenised, split
into sub-words, translated with beam search, joined and detokenised. With --line-by-line, each line is translated before
the next one is read, so the process can serve another program.
"""

import argparse
import glob
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools.arguments import argument, at_least_one, at_least_zero, digits
from fairseq_deep.tools.input_text import decode_lines, read_lines, stdin
from fairseq_deep.tools.output_files import check_outputs, replacing

EXAMPLE = "fairseq-deep translate exp/demo --input news.en --output news.de"
CHUNK = 2000  # number of lines sorted by length together
SEARCH = ("beam", "lenpen", "max_len_a", "max_len_b")
SUB_WORDS = {"subword-nmt": re.compile("@@( |$)"), "sentencepiece": re.compile("\u2581")}  # marks in text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add models, input and output, the search, and the parts of a single checkpoint."""
    kinds = "run, package, checkpoint, or directory for CTranslate2 or transformers; several form an ensemble"
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=kinds)
    add("--input", default="-", metavar="FILE", help="UTF-8 text, one sentence per line, plain or .gz (default: stdin)")
    add("--output", default="-", metavar="FILE", help="file for the translations (default: stdout)")
    add("--json", action="store_true", help="write JSON lines: line, source, translations (text and score)")
    hypotheses = "with --json: number of hypotheses per line (default: 1)"
    add("--nbest", type=at_least_one, default=1, metavar="N", help=hypotheses)
    add("--line-by-line", action="store_true", help="translate each line immediately, as on a terminal")
    add_search(parser)
    add_parts(parser)


def add_search(parser: argparse.ArgumentParser, beam: int | None = None) -> None:
    """Add the flags of beam search and batches; *beam* None: the recipe's."""
    add = parser.add_argument_group("search").add_argument
    usual = "the recipe's, or 4" if beam is None else beam
    gnmt = "use GNMT's length penalty, ((5 + length) / 6)^A (default: as in the recipe)"
    length = "maximum output length A x source + B, in tokens (default: the recipe's, or 1.0)"
    longest = "B of the maximum output length (default: the recipe's, or 50)"
    precision = "precision of linear layers on a CPU (default: fp32)"
    add("--beam", type=at_least_one, metavar="N", default=beam, help=f"beam width (default: {usual})")
    add("--lenpen", type=at_least_zero, metavar="A", help="length penalty (default: the recipe's, or 0.6)")
    add("--gnmt-lenpen", action="store_true", default=None, help=gnmt)
    add("--max-len-a", type=at_least_zero, metavar="A", help=length)
    add("--max-len-b", type=argument("a whole number of at least 0", digits), metavar="B", help=longest)
    add("--decode-precision", choices=("fp32", "bf16", "int8"), default="fp32", help=precision)
    add("--batch-size", type=at_least_one, default=64, metavar="N", help="sentences per batch (default: 64)")
    add("--max-tokens", type=at_least_one, default=4000, metavar="N", help="tokens per batch (default: 4000)")
    add("--cpu", action="store_true", help="do not use a GPU")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Add the options of `find_bundle` for a single checkpoint."""
    add = parser.add_argument_group("settings of a single checkpoint").add_argument
    data = "directory with dict.SRC.txt and dict.TGT.txt (default: the checkpoint's)"
    codes = "subword-nmt merges, or SentencePiece model "
    codes += "(default: 'code', 'bpecodes', 'spm.model' or 'sentencepiece.bpe.model')"
    tokenizer = "tokenizer of raw text (default: moses; none with SentencePiece)"
    add("--data", metavar="DIR", help=data)
    add("--bpe-codes", metavar="FILE", help=codes)
    add("--tokenizer", choices=("moses", "none"), help=tokenizer)
    add("--lowercase", action="store_true", default=None, help="lowercase the source")
    for short, side, name in (("-s", "source", "SRC"), ("-t", "target", "TGT")):
        text = f"{side} language (default: from the checkpoint or file names)"
        add(short, f"--{side}-lang", metavar=name, help=text)


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
    waiting, size = iter(decode_lines(stdin(), "stdin") if lines is None else lines), 1 if stay else CHUNK
    chunks = iter(lambda: list(itertools.islice(waiting, size)), [])
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


class Progress:
    """Progress line on a terminal; nothing is shown if *total* is None."""

    def __init__(self, total: int | None):
        self.total, self.begun, self.done = total, time.time(), 0
        self.shown = total is not None and sys.stderr.isatty()

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
    translator.on_batch = lambda lines: progress.show(progress.done + lines)
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
