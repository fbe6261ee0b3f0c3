"""score translations: sacreBLEU with its signature, tokenised BLEU, or compound-split BLEU

Three measures that must not be mixed up, each labelled in the output:

- default: sacreBLEU on detokenised text (13a tokenisation, mixed case), the one to compare across papers;
- ``--tokenized``: BLEU on the tokens as they are (as multi-bleu does, without smoothing);
- ``--compound-split``: the same after splitting compounds at hyphens on both sides, which inflates the score.
"""

import argparse
import json
import re
import sys
from typing import Any, NamedTuple, Optional

from fairseq_deep.tools import UserError, check_output_path, format_table, write_text

MEASURES = {
    "sacrebleu": "sacreBLEU (detokenised text)",
    "tokenized": "tokenised BLEU (as multi-bleu; depends on the tokenisation)",
    "compound-split": "compound-split tokenised BLEU (inflated: not comparable with the others)",
}
# ASCII: only ASCII white space separates, as where the substitution runs on bytes.
_COMPOUND = re.compile(r"(\S)-(\S)", re.ASCII)
_GENERATED = re.compile(r"([HDT])-(\d+)(?:\t|$)")


class Texts(NamedTuple):
    """Hypotheses and references, line by line, and where each comes from."""

    hypotheses: list[str]
    references: list[str]
    hypotheses_from: str
    references_from: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the inputs, the choice of measure, and the outputs."""
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--sys", metavar="FILE", help="hypotheses, one a line ('-': standard input)")
    inputs.add_argument("--generate-output", metavar="FILE", help="output of fairseq-generate ('-': standard input)")
    parser.add_argument("--ref", metavar="FILE", help="references; with --generate-output they replace its T- lines")
    measure = parser.add_mutually_exclusive_group()
    measure.add_argument("--tokenized", action="store_true", help="BLEU on tokenised text as it is (as multi-bleu)")
    measure.add_argument("--compound-split", action="store_true", help="split a-b into 3 tokens, then as --tokenized")
    parser.add_argument("--lang", metavar="LANG", help="target language: chooses sacreBLEU's tokeniser for zh, ja, ko")
    parser.add_argument("--lowercase", action="store_true", help="ignore case")
    parser.add_argument("--detokenize", metavar="LANG", help="with --generate-output: detokenise its H- and T- lines")
    parser.add_argument("--hypotheses", metavar="OUT", help="with --generate-output: write the hypotheses, in order")
    parser.add_argument("--references", metavar="OUT", help="with --generate-output: write the references, in order")
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, score, print the table and, as the last line, ``BLEU = NN.NN``."""
    _check_arguments(args)
    texts = _read_generated(args) if args.generate_output else _read_pair(args.sys, args.ref)
    for path, lines in ((args.hypotheses, texts.hypotheses), (args.references, texts.references)):
        if path:
            write_text(path, "".join(line + "\n" for line in lines))
    measure = "compound-split" if args.compound_split else "tokenized" if args.tokenized else "sacrebleu"
    _warn_about(texts.hypotheses, measure)
    result = compute(texts.hypotheses, texts.references, measure, args.lowercase, args.lang or "")
    result.update(hypotheses=texts.hypotheses_from, references=texts.references_from)
    if args.json:
        write_text(args.json, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    _report(result)
    return 0


def compute(
    hypotheses: list[str], references: list[str], measure: str, lowercase: bool = False, lang: str = ""
) -> dict[str, Any]:
    """Return BLEU and what it is made of.

    Args:
        hypotheses: one sentence each; `references` has as many.
        measure: a key of `MEASURES`.
        lang: target language, for sacreBLEU's choice of tokeniser.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise UserError(f"sacrebleu cannot be imported ({error}); pip install 'sacrebleu>=2'") from error
    if measure == "compound-split":
        hypotheses, references = ([split_compounds(line) for line in side] for side in (hypotheses, references))
    if measure == "sacrebleu":
        metric = BLEU(lowercase=lowercase, force=True, trg_lang=lang)
    else:
        metric = BLEU(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")
    bleu = metric.corpus_score(hypotheses, [references])
    result = {
        "measure": measure,
        "label": MEASURES[measure],
        "bleu": bleu.score,
        "precisions": list(bleu.precisions),
        "brevity_penalty": bleu.bp,
        "hypothesis_length": bleu.sys_len,
        "reference_length": bleu.ref_len,
        "sentences": len(hypotheses),
        "signature": str(metric.get_signature()),
    }
    if measure == "sacrebleu":
        chrf = CHRF(lowercase=lowercase)
        result.update(chrf=chrf.corpus_score(hypotheses, [references]).score, chrf_signature=str(chrf.get_signature()))
    return result


def split_compounds(line: str) -> str:
    """Split words at inner hyphens, one pass from left to right without overlap (``a-b-c`` splits once)."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


def parse_generated(lines: list[str]) -> tuple[dict[int, str], dict[int, str]]:
    """Return the best hypothesis and the reference of each sentence id in the output of ``fairseq-generate``.

    Of several hypotheses (``--nbest``) the first is the best. A D- line, the hypothesis after ``--bpe`` and
    ``--tokenizer``, beats the H- line: the T- line has been through these, too. Without these flags both are equal.
    """
    kinds: dict[str, dict[int, str]] = {"H": {}, "D": {}, "T": {}}
    for line in lines:
        match = _GENERATED.match(line)
        if match:
            kind, sentence = match[1], int(match[2])
            fields = line.split("\t", 1 if kind == "T" else 2)
            text = fields[-1] if len(fields) == (2 if kind == "T" else 3) else ""
            kinds[kind].setdefault(sentence, text)
    return {**kinds["H"], **kinds["D"]}, kinds["T"]


def _check_arguments(args: argparse.Namespace) -> None:
    if args.sys and not args.ref:
        raise UserError("--sys needs --ref FILE, the references")
    if args.sys:
        for flag in ("detokenize", "hypotheses", "references"):
            if getattr(args, flag):
                raise UserError(f"--{flag} goes with --generate-output, not with --sys")
    if args.detokenize and (args.tokenized or args.compound_split):
        raise UserError("--detokenize clashes with --tokenized and --compound-split: they score tokens; drop one")
    for path in (args.hypotheses, args.references, args.json):
        if path:
            check_output_path(path)


def _read_lines(path: str) -> list[str]:
    r"""Return the lines of a UTF-8 file, split at ``\n`` alone, so that U+2028 or U+0085 inside a line do no harm."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        text = data.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} is not UTF-8 (line {line}); convert it with iconv") from error
    if not text:
        raise UserError(f"{path} is empty (0 lines)")
    return text[:-1].split("\n") if text.endswith("\n") else text.split("\n")


def _read_pair(system: str, reference: str) -> Texts:
    texts = Texts(_read_lines(system), _read_lines(reference), system, reference)
    counts = len(texts.hypotheses), len(texts.references)
    if counts[0] != counts[1]:
        raise UserError(f"line counts differ: {system} has {counts[0]}, {reference} has {counts[1]}; align the files")
    return texts


def _read_generated(args: argparse.Namespace) -> Texts:
    path = args.generate_output
    hypotheses, references = parse_generated(_read_lines(path))
    if not hypotheses:
        raise UserError(f"{path} holds no line 'H-...'; give the output of fairseq-generate, run without --quiet")
    detokenize = _detokenizer(args.detokenize)
    if args.ref:
        external = _read_lines(args.ref)
        references, source = dict(enumerate(external)), args.ref
    else:
        references, source = {key: detokenize(line) for key, line in references.items()}, path
        if not references:
            raise UserError(f"{path} holds no line 'T-...' (no target side?); give the references with --ref")
    if hypotheses.keys() != references.keys():
        first = min(hypotheses.keys() ^ references.keys())
        raise UserError(
            f"{path} has {len(hypotheses)} hypotheses for {len(references)} references of {source}: "
            f"sentence {first} has only one of them; generate again, without dropping sentences"
        )
    order = sorted(hypotheses)
    if order[-1] + 1 != len(order):
        missing = next(index for index, key in enumerate(order) if index != key)
        _warn(f"{path} has {len(order)} sentences of at least {order[-1] + 1} (first without: {missing})")
    return Texts([detokenize(hypotheses[key]) for key in order], [references[key] for key in order], path, source)


def _detokenizer(lang: Optional[str]):
    if lang is None:
        return lambda line: line
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise UserError(f"sacremoses cannot be imported ({error}); pip install sacremoses") from error
    moses = MosesDetokenizer(lang=lang)
    return lambda line: moses.detokenize(line.split())


def _warn_about(hypotheses: list[str], measure: str) -> None:
    pieces = sum("@@ " in line or line.endswith("@@") for line in hypotheses)
    if pieces:
        _warn(f"{pieces} hypotheses hold sub-word marks (@@): join them first (fairseq-generate --remove-bpe)")
    tokenized = sum(line.endswith(" .") for line in hypotheses)
    if measure == "sacrebleu" and tokenized > len(hypotheses) / 4:
        _warn(f"{tokenized} hypotheses end in ' .': detokenise tokenised text first (or use --tokenized)")


def _warn(message: str) -> None:
    print(f"fairseq-deep score: warning: {message}", file=sys.stderr)


def _report(result: dict[str, Any]) -> None:
    lengths = f"{result['hypothesis_length']:,} hypothesis / {result['reference_length']:,} reference words"
    rows = [
        ("measure", result["label"]),
        ("precisions", " / ".join(f"{value:.1f}" for value in result["precisions"])),
        ("brevity", f"{result['brevity_penalty']:.3f} ({lengths})"),
        ("sentences", f"{result['sentences']:,}"),
        ("signature", result["signature"]),
    ]
    if "chrf" in result:
        rows.append(("chrF", f"{result['chrf']:.2f}  ({result['chrf_signature']})"))
    print(format_table(rows))
    print(f"BLEU = {result['bleu']:.2f}")
