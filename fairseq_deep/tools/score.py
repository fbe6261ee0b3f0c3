"""score translations: sacreBLEU with its signature, tokenised BLEU, or compound-split BLEU

There are three measures, labelled in the output, which are not comparable with each other:

- default: sacreBLEU on detokenised text (13a tokenisation, mixed case), for comparisons across papers;
- ``--tokenized``: BLEU on tokenised text (like multi-bleu, without smoothing);
- ``--compound-split``: like ``--tokenized``, after splitting compounds at hyphens, which inflates the score.

All measures support several sets of references. ``--against`` tests the difference to another system for significance.
Several systems give one table. ``--multilingual`` scores one model for many language pairs.
"""

import argparse
import json
import re
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.bleu import bleu_for
from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.tools import multilingual, significance, text_checks
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.generated import best, read_generated
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_outputs, write_text
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep score --sys hypotheses.de --ref references.de"
MEASURES = {
    "sacrebleu": "sacreBLEU (detokenised text)",
    "tokenized": "tokenised BLEU (as multi-bleu; depends on the tokenisation)",
    "compound-split": "compound-split tokenised BLEU (inflated: not comparable with the others)",
}
# ASCII: only ASCII white space is a separator, like in the original substitution on bytes.
_COMPOUND = re.compile(r"(\S)-(\S)", re.ASCII)


class Texts(NamedTuple):
    """Hypotheses and sets of references: the files that they are from, and their lines."""

    origin: str
    references_from: list[str]
    hypotheses: list[str]
    references: list[list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the inputs, the choice of measure, and the outputs."""
    several = "'-': standard input; several files: one table of all systems"
    pairs = "directory with test.SRC-TGT.hyp and test.SRC-TGT.ref per pair; --against DIR adds the win ratio"
    sets = "references, once per set; with --generate-output, they replace its T- lines"
    hypotheses = "with --generate-output: write the hypotheses, in order"
    references = "with --generate-output: write the references, in order, once per set"
    against = "other system, directory of a recipe's run or file of hypotheses, for a paired bootstrap of BLEU and chrF"
    resamples = "resamples of the bootstrap, with several systems or --against"
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    for flag, kind in (("--sys", "hypotheses, one per line"), ("--generate-output", "output of fairseq-generate")):
        add(flag, metavar="FILE", nargs="+", action="extend", help=f"{kind} ({several})")
    add("--multilingual", metavar="DIR", help=pairs)
    parser.add_argument("--ref", action="append", default=[], metavar="FILE", help=sets)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--tokenized", action="store_true", help="compute BLEU on tokenised text, like multi-bleu")
    add("--compound-split", action="store_true", help="split a-b into 3 tokens, then as --tokenized")
    add = parser.add_argument
    add("--lang", metavar="LANG", help="target language, to select sacreBLEU's tokenizer")
    add("--lowercase", action="store_true", help="ignore case")
    add("--detokenize", metavar="LANG", help="with --generate-output: detokenise its H- and T- lines")
    add("--hypotheses", metavar="OUT", help=hypotheses)
    add("--references", action="append", default=[], metavar="OUT", help=references)
    add("--against", metavar="RUN|FILE", help=against)
    default = significance.RESAMPLES
    add("--resamples", type=at_least_one, metavar="N", help=f"{resamples} (default: {default})")
    add("--json", metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Score the translations, print a table and, as the last line, ``BLEU = NN.NN``."""
    _check_arguments(args)
    if args.multilingual:
        metric = _metrics("sacrebleu", args.lowercase, "")["BLEU"]
        result = multilingual.score_folder(args.multilingual, metric, args.against)
        shown = multilingual.report(result)
    else:
        result, shown = _score(args)
    if args.json:
        write_text(args.json, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(shown)
    return 0


def _read_systems(args: argparse.Namespace, measure: str, lang: str) -> list[Texts]:
    """Return the texts of all systems, which must be suitable for the *measure* and have the same references."""
    read = _read_generated if args.generate_output else _read_pair
    systems = [read(path, args) for path in args.generate_output or args.sys]
    first = systems[0]
    for each in systems:
        references = list(zip(each.references_from, each.references))
        text_checks.check_texts((each.origin, each.hypotheses), references, measure, lang)
        if each.references != first.references:
            problem = f"{each.origin} has other references than {first.origin}"
            raise UsageError(f"{problem}; give the same with --ref")
    if args.references and len(args.references) != len(first.references):
        sets = f"{len(first.references)} set(s) of references"
        raise UsageError(f"--references is given {len(args.references)} time(s) for {sets}; give it once per set")
    return systems


def _score(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the result for one system or several ones, and its table."""
    lang = text_checks.target_language(args.lang, args.detokenize)
    measure = "compound-split" if args.compound_split else "tokenized" if args.tokenized else "sacrebleu"
    systems = _read_systems(args, measure, lang)
    first = systems[0]
    if args.against:
        other = significance.read_other(args.against, first.references, args.lang or "")
        systems = [first._replace(origin=args.against, hypotheses=other), first]
    for path, lines in ((args.hypotheses, first.hypotheses), *zip(args.references, first.references)):
        if path:
            write_text(path, "".join(line + "\n" for line in lines))
    compared = _compare(args, systems, measure, lang) if len(systems) > 1 else {}
    settings = {"resamples": args.resamples or significance.RESAMPLES, "seed": significance.SEED}
    if compared and not args.against:
        result = _of_several(systems, measure, compared, settings)
        rows = [("measure", result["label"]), ("sentences", f"{result['sentences']:,}"), *result["signatures"].items()]
        scores = [each["BLEU"]["score"] for each in result["systems"]]
    else:
        result = compute(first.hypotheses, first.references, measure, args.lowercase, lang)
        rows, scores, sources = _rows(result), [result["bleu"]], first.references_from
        result.update(hypotheses=first.origin, references=sources[0] if len(sources) == 1 else sources)
    if args.against:
        differences = {name: _difference(each) for name, each in compared.items()}
        result["against"] = {"system": args.against, **settings, "measures": differences}
    for each, score in zip(systems[bool(args.against) :], scores):
        text_checks.check_score(each.origin, score)
    last = "BLEU = " + " ".join(f"{score:.2f}" for score in scores)
    if not compared:
        return result, f"{format_table(rows)}\n{last}"
    note = "p: paired bootstrap against the first system, {resamples:,} resamples, seed {seed}".format(**settings)
    table = significance.table(compared, [each.origin for each in systems])
    return result, f"{format_table(rows)}\n\n{note}\n{table}\n\n{last}"


def _compare(args: argparse.Namespace, systems: list[Texts], measure: str, lang: str) -> dict[str, Any]:
    """Compare the first of *systems* with each other one."""
    named = [(f"{index}:{each.origin}", _cut(each.hypotheses, measure)) for index, each in enumerate(systems)]
    references = [_cut(side, measure) for side in systems[0].references]
    metrics = _metrics(measure, args.lowercase, lang)
    return significance.paired_bootstrap(named, references, metrics, args.resamples or significance.RESAMPLES)


def _of_several(systems: list[Texts], measure: str, compared: dict[str, Any], settings: dict[str, int]) -> dict:
    """Return the result for several systems, with a record per system."""
    records = zip(*(each.systems for each in compared.values()))
    return {
        "measure": measure, "label": MEASURES[measure], "sentences": len(systems[0].hypotheses),
        "systems": [{"hypotheses": each.origin, **dict(zip(compared, found))} for each, found in zip(systems, records)],
        "references": systems[0].references_from, **settings,
        "signatures": {name: each.signature for name, each in compared.items()},
    }  # fmt: skip


def _difference(found: significance.Measured) -> dict[str, Any]:
    """Return the record of a measure for two systems."""
    other, ours = ({name: value for name, value in each.items() if name != "p"} for each in found.systems)
    difference = {"difference": ours["score"] - other["score"], "p": found.systems[1]["p"]}
    return {"other": other, "ours": ours, **difference, "signature": found.signature}


def compute(
    hypotheses: list[str], references: list[list[str]], measure: str, lowercase: bool = False, lang: str = ""
) -> dict[str, Any]:
    """Return BLEU and its components.

    Args:
        hypotheses: sentences; each list in `references` has the same length.
        measure: a key of `MEASURES`.
        lang: target language, to select sacreBLEU's tokenizer.
    """
    hypotheses, *references = (_cut(side, measure) for side in (hypotheses, *references))
    metrics = _metrics(measure, lowercase, lang)
    metric = metrics["BLEU"]
    bleu = metric.corpus_score(hypotheses, references)
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
    if "chrF" in metrics:
        chrf = metrics["chrF"]
        result.update(chrf=chrf.corpus_score(hypotheses, references).score, chrf_signature=str(chrf.get_signature()))
    return result


def _metrics(measure: str, lowercase: bool, lang: str) -> dict[str, Any]:
    """Return new sacreBLEU metrics: BLEU for `measure` and, for detokenised text, chrF."""
    from sacrebleu.metrics import BLEU, CHRF

    if measure == "sacrebleu":
        return {"BLEU": bleu_for(lang, lowercase=lowercase, force=True), "chrF": CHRF(lowercase=lowercase)}
    return {"BLEU": BLEU(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")}


def _cut(lines: list[str], measure: str) -> list[str]:
    return [split_compounds(line) for line in lines] if measure == "compound-split" else lines


def split_compounds(line: str) -> str:
    """Split words at inner hyphens, one pass from left to right without overlap (``a-b-c`` splits once)."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


def _check_arguments(args: argparse.Namespace) -> None:
    systems = args.sys or args.generate_output or []
    if args.sys and not args.ref:
        raise UsageError("--sys requires the references: add --ref FILE")
    for condition, flags, problem in (
        (args.multilingual, "ref tokenized compound-split lang detokenize hypotheses references resamples",
         "is not supported with --multilingual; omit one of them"),
        (args.sys, "detokenize hypotheses references",
         "requires --generate-output and is not supported with --sys; omit it"),
        (args.tokenized or args.compound_split, "detokenize",
         "is not supported with --tokenized and --compound-split, which score tokens; omit one"),
        (args.tokenized or args.compound_split, "lang",
         "selects sacreBLEU's tokenizer, which --tokenized and --compound-split do not use; omit one"),
        (args.tokenized or args.compound_split, "against",
         "requires sacreBLEU on detokenised text; omit --tokenized and --compound-split"),
        (len(systems) > 1, "against hypotheses references",
         "is not supported with several systems; omit it, or give one system"),
    ):  # fmt: skip
        flag = next((flag for flag in flags.split() if getattr(args, flag.replace("-", "_"))), None)
        if condition and flag:
            raise UsageError(f"--{flag} {problem}")
    if [*systems, *args.ref, args.against].count("-") > 1:
        raise UsageError("'-' is given twice: standard input has one text; give files")
    if args.resamples and not args.against and len(systems) < 2:
        raise UsageError("--resamples requires another system; add it, or --against RUN or FILE")
    inputs = [*systems, args.multilingual, args.against, *args.ref]
    check_outputs([args.hypotheses, *args.references, args.json], inputs)


def _read_pair(system: str, args: argparse.Namespace) -> Texts:
    texts = Texts(system, args.ref, read_lines(system), [read_lines(path) for path in args.ref])
    for path, references in zip(args.ref, texts.references):
        counts = len(texts.hypotheses), len(references)
        if counts[0] != counts[1]:
            raise UsageError(f"line counts differ: {system} has {counts[0]}, {path} has {counts[1]}; align the files")
    return texts


def _read_generated(path: str, args: argparse.Namespace) -> Texts:
    sentences = read_generated(path)
    text_checks.check_decoded(path, sentences)
    detokenize = _detokenizer(args.detokenize)
    hypotheses = {number: detokenize(best(kinds)) for number, kinds in sentences.items() if "H" in kinds}
    sources, sets = args.ref, [dict(enumerate(read_lines(name))) for name in args.ref]
    if not args.ref:
        sources, sets = [path], [{key: detokenize(kinds["T"]) for key, kinds in sentences.items() if "T" in kinds}]
        if not sets[0]:
            raise UsageError(f"{path} has no line 'T-...' (no target side?); give the references with --ref")
    for source, references in zip(sources, sets):
        if hypotheses.keys() != references.keys():
            first = min(hypotheses.keys() ^ references.keys())
            raise UsageError(
                f"{path} has {len(hypotheses)} hypotheses for {len(references)} references of {source}: "
                f"sentence {first} has only one of them; generate again without dropping sentences"
            )
    order = sorted(hypotheses)
    if order[-1] + 1 != len(order):
        missing = next(index for index, key in enumerate(order) if index != key)
        text_checks.warn(f"{path} has {len(order)} sentences of at least {order[-1] + 1} (first missing: {missing})")
    return Texts(path, sources, [hypotheses[key] for key in order], [[each[key] for key in order] for each in sets])


def _detokenizer(lang: str | None):
    if lang is None:
        return lambda line: line
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(lang=short_code(lang))
    return lambda line: moses.detokenize(line.split())


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
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
    return rows
