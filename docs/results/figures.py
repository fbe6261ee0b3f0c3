"""Figures of the docs, computed from the runs in ``docs/results/records``.

``python docs/results/figures.py`` rewrites the tables of all pages. A page marks a table by ``<!-- table: NAME -->``
before it and ``<!-- end -->`` after it. `CONTRASTS` lists the differences that pages quote in their text.
"""

import functools
import json
import math
import re
import statistics
from pathlib import Path

from fairseq_deep.tools.results import holm as correct
from fairseq_deep.tools.results import over_seeds

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).resolve().parent / "records"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
TABLE = re.compile(r"<!-- table: ([a-z0-9-]+) -->\n(.*?)<!-- end -->", re.DOTALL)

CONTRASTS = {
    "depth": [
        ("pre_20", "pre_6"), ("dlcl_20", "dlcl_6"), ("completep_20", "completep_6"), ("dlcl_6", "pre_6"),
        ("dlcl_20", "pre_20"), ("dlcl_20", "pre_6"), ("completep_6", "pre_6"), ("completep_20", "pre_20"),
        ("completep_6", "dlcl_6"), ("completep_20", "dlcl_20"),
    ],
    "dlcl-ablations": [
        ("dlcl_20", "third"), ("dlcl_20", "one"), ("third", "one"), ("third", "thirdnonorm"), ("dlcl_20", "nonorm"),
    ],
    "large-updates-6-24": [
        ("completep_24", "completep_6-rate0.008"), ("completep_6-updates7290", "completep_24"),
        ("completep_6-width128", "completep_24"), ("plain_24", "plain_6"), ("dlcl_24", "dlcl_6"),
        ("completep_6-rate0.008", "completep_6"), ("completep_6-rate0.008", "dlcl_6"), ("completep_24", "dlcl_24"),
        ("dlcl_6", "plain_6"), ("dlcl_24", "plain_24"),
    ],
    "large-updates-3-6": [("completep_6", "completep_3"), ("pre_6", "pre_3")],
    "completep-6-24": [("completep_24", "completep_6")],
    "control-task": [("pre_8", "pre_2")],
    "modern-methods": [
        ("cp_modern", "pre"), ("cp_modern", "completep"), ("muon", "pre"), ("completep", "pre"), ("hyper", "pre"),
    ],
    "deep-shallow": [
        ("12+1 modern", "6+6 plain"), ("6+6 plain, R-Drop", "6+6 plain"), ("6+6 modern", "6+6 plain"),
        ("6+6 modern", "12+1 modern"), ("6+6 plain", "12+1 plain"), ("12+1 plain, distilled", "12+1 plain"),
        ("12+1 CompleteP, distilled", "12+1 CompleteP"), ("6+6 plain", "12+1 CompleteP"),
    ],
    "lstm": [
        ("lstm_12_12", "pre_12_12"), ("lstm_6", "pre_6"), ("lstm_3_3", "pre_3_3"), ("lstm_6", "lstm_3_3"),
        ("lstm_12_12", "lstm_6"), ("lstm_6", "pre_12_12"), ("pre_3_3", "pre_6"),
    ],
    "twelve": [
        ("completep", "lstm"), ("completep", "pre"), ("completep", "dlcl"), ("completep", "ds"), ("dlcl", "lstm"),
        ("lstm", "pre"),
    ],
    "six": [
        ("modern", "pre"), ("completep", "pre"), ("dlcl", "pre"), ("lstm", "pre"), ("modern", "completep"),
        ("modern_12_1", "pre"), ("modern", "modern_12_1"), ("modern", "dlcl"), ("modern", "lstm"),
        ("dlcl", "completep"), ("lstm", "completep"), ("dlcl", "lstm"), ("modern_12_1_taught", "modern_12_1"),
        ("modern_12_1_taught", "pre"),
    ],
    "six-24": [("modern_12_1", "pre"), ("modern", "pre"), ("modern", "modern_12_1")],
    "ds-init-one-stack": [("matt_ds_12", "ds_12"), ("matt_ds_12", "matt_ds_encoder_12_clipped")],
}  # fmt: skip
"""Pairs of systems by record. Differences are of runs with the same seed."""

UNRECORDED = ["37.52"]
"""Scores that pages quote of runs whose records were not kept, and say so."""


@functools.cache
def runs(record):
    """Return ``{system: {seed: run}}`` of a record."""
    found = {}
    for line in (RECORDS / f"{record}.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        found.setdefault(run["system"], {})[run.get("seed", len(found))] = run
    return found


@functools.cache
def speeds(test):
    """Return ``{system: its line}`` of one test of decoding."""
    lines = map(json.loads, (RECORDS / "decoding.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["system"]: line for line in lines if line["test"] == test}


def values(record, system, measure):
    return [run[measure] for run in runs(record)[system].values() if run.get(measure) is not None]


def differences(record, one, other, measure):
    """Return *one* minus *other* for each seed that both have."""
    first, second = runs(record)[one], runs(record)[other]
    pairs = [(first[seed].get(measure), second[seed].get(measure)) for seed in first if seed in second]
    return [a - b for a, b in pairs if None not in (a, b)]


def half_width(found):
    """Return the half of the 95 % confidence interval of a mean over seeds, None for fewer than three seeds."""
    return over_seeds(found).get("half")


def difference(record, one, other, measure="bleu", decimals=2, unit=1.0):
    """Return the text of a mean difference, with its 95 % interval if there are three seeds or more."""
    found = [unit * each for each in differences(record, one, other, measure)]
    half = half_width(found)
    return f"{statistics.fmean(found):+.{decimals}f}" + (f" ± {half:.{decimals}f}" if half is not None else "")


def quoted():
    """Return the texts that pages may quote, without signs: scores, differences and intervals."""
    texts = set(UNRECORDED)
    for record, pairs in CONTRASTS.items():
        for one, other in pairs:
            texts |= {difference(record, one, other), difference(record, one, other).partition(" ")[0]}
            texts.add(difference(record, one, other, "chrf"))
            for measure in ("valid_nll", "train_text_nll"):
                if differences(record, one, other, measure):
                    texts |= {difference(record, one, other, measure, n, math.log(2)) for n in (2, 3)}
    for path in RECORDS.glob("*.jsonl"):
        for system in runs(path.stem):
            for measure in ("bleu", "chrf"):
                found = values(path.stem, system, measure)
                texts |= {f"{each:.2f}" for each in (*found, statistics.fmean(found))} if found else set()
    return {text.lstrip("+-") for text in texts}


def spread(measure, decimals, ends=True):
    """Return a column: the mean over seeds, with minimum and maximum."""

    def cell(record, system):
        found = values(record, system, measure)
        if not found:
            return "-"
        mean = f"{statistics.fmean(found):.{decimals}f}"
        return f"{mean} [{min(found):.{decimals}f}, {max(found):.{decimals}f}]" if ends and len(found) > 1 else mean

    return cell


def flag(name):
    return lambda record, system: next(iter(runs(record)[system].values()))["flags"].get(name, "-")


COLUMNS = {
    "parameters": lambda record, system: f"{values(record, system, 'parameters')[0]:,}",
    "updates": lambda record, system: f"{values(record, system, 'updates')[0]:,}",
    "seeds": lambda record, system: str(len(runs(record)[system])),
    "trained on": lambda record, system: "H100" if "H100" in values(record, system, "hardware")[0] else "CPU",
    "rate": flag("--lr"),
    "valid loss": spread("valid_loss", 3),
    "valid loss, mean": spread("valid_loss", 3, ends=False),
    "BLEU": spread("bleu", 2),
    "BLEU, mean": spread("bleu", 2, ends=False),
    "chrF": spread("chrf", 2, ends=False),
    "BLEU, reporting half": lambda record, system: " ".join(
        f"{run['parts']['reporting']['bleu']:.2f}" for run in runs(record)[system].values()
    ),
    "source gain": spread("source_gain", 2, ends=False),
    "over plain": lambda record, system: difference(record, system, "pre") if system != "pre" else "",
    "p (Holm)": lambda record, system: holm(record, "pre").get(system, ""),
}


@functools.cache
def holm(record, other):
    """Return the p of the paired t-test of each system with three seeds against *other*, corrected by Holm's method."""
    others = [system for system in runs(record) if system != other]
    tests = {system: over_seeds(differences(record, system, other, "bleu")) for system in others}
    found = {system: test["p"] for system, test in tests.items() if test}
    return {system: f"{p:.2g}" for system, p in zip(found, correct([*found.values()], len(found)))}


def markdown(head, rows):
    """Return the text of a table; the first column is aligned to the left."""
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], f"|---|{'---:|' * (len(head) - 1)}\n", *lines[1:]])


def of_runs(record, columns, rows, first="system"):
    """Return a table with a row for each of *rows*, ``{label: system}``."""
    cells = [[label, *(COLUMNS[column](record, system) for column in columns)] for label, system in rows.items()]
    return markdown([first, *columns], cells)


def of_speeds(tests, rows, columns):
    """Return sentences per second and ratios of systems, and of their int8 forms, in *tests*, ``{title: test}``."""
    head, cells = ["system"], [[label] for label in rows]
    for title, test in tests.items():
        head += [f"{title}{column}" for column in columns]
        for cell, system in zip(cells, rows.values()):
            for kind, measure, decimals in columns.values():
                line = speeds(test).get(system + kind)
                value = line[measure] if line else None
                cell.append("-" if value is None else f"{value + 1e-9:,.{decimals}f}")
    return markdown(head, cells)


BY_DEPTH = {
    "plain pre-norm, 6 layers": "pre_6", "plain pre-norm, 20 layers": "pre_20", "DLCL, 6 layers": "dlcl_6",
    "DLCL, 20 layers": "dlcl_20", "CompleteP, 6 layers": "completep_6", "CompleteP, 20 layers": "completep_20",
}  # fmt: skip
MODERN = {
    "Hyper-Connections": "hyper", "Hyper-Connections, static": "hyper_static", "DenseFormer, SwiGLU": "dense_swiglu",
    "`transformer_modern`": "cp_modern", "MUDD": "mudd", "Attention Residuals": "attnres", "DenseFormer": "denseformer",
    "CompleteP, SwiGLU": "cp_swiglu", "CompleteP": "completep", "mHC": "mhc", "DLCL": "dlcl", "Muon": "muon",
    "RMSNorm, SwiGLU, rotary": "modern", "SwiGLU": "swiglu", "GTrans": "gtrans", "LayerNorm scaling": "ln_scaling",
    "GEGLU": "geglu", "value residual": "value", "gated attention": "gate", "plain, wider feed-forward": "pre_wide",
    "QK-norm": "qk_norm", "rotary positions": "rotary", "RMSNorm": "rms", "Peri-LN": "peri", "plain pre-norm": "pre",
    "one key-value head": "kv_heads", "SSRU": "ssru", "Luna encoder": "luna", "Sub-LN": "sub_norm",
    "ResiDual": "residual_dual",
}  # fmt: skip
SCORES = ["parameters", "rate", "valid loss", "BLEU", "chrF"]
REPORTED = ["chrF", "BLEU, reporting half"]
INT8 = {"fp32": ("", "sentences_per_second", 1), "int8": ("-int8", "sentences_per_second", 1)}
OF_STOCK = {"fp32, stock = 1": ("", "of_stock", 2), "int8, stock = 1": ("-int8", "of_stock", 2)}
OF_BOTH = {
    **OF_STOCK, "fp32, CTranslate2 = 1": ("", "of_ctranslate2", 2),
    "int8, CTranslate2 = 1": ("-int8", "of_ctranslate2", 2),
}  # fmt: skip
DECODERS = {
    "plain": "ours", "CTranslate2, plain": "ctranslate2", "DLCL": "dlcl", "depth-wise LSTM": "lstm",
    "merged attention": "merged", "average attention": "average",
}  # fmt: skip
ENGINES = {"stock fairseq": "stock", "ours": "ours", "CTranslate2": "ctranslate2"}
SHALLOW = {
    "6 + 6, stock fairseq": "stock", "6 + 6, CTranslate2": "ctranslate2", "6 + 6, plain": "pre",
    "6 + 6, `transformer_modern_6l`": "modern", "12 + 1, `transformer_modern_12l1l`": "modern_12_1",
}  # fmt: skip

TABLES = {
    "readme": lambda: of_runs("six", ["BLEU, mean", "over plain"], {
        "plain pre-norm": "pre", "DLCL: layers read learned sums of all below": "dlcl",
        "depth-wise LSTM instead of residual connections, 18 % more parameters": "lstm",
        "CompleteP: residual branches times 1 / depth": "completep",
        "`transformer_modern_6l`: CompleteP, SwiGLU, RMSNorm, rotary positions": "modern"}, first="6 + 6 layers"),
    "depth": lambda: of_runs("depth", SCORES, BY_DEPTH),
    "large-updates": lambda: of_runs("large-updates-6-24", ["updates", "trained on", "seeds", *SCORES], {
        "CompleteP, 6 layers": "completep_6-rate0.008", "the same, too high rate": "completep_6",
        "the same, computation of 24 layers": "completep_6-updates7290", "CompleteP, 24 layers": "completep_24",
        "CompleteP, 6 layers of width 128": "completep_6-width128", "plain, 6 layers": "plain_6",
        "plain, 24 layers": "plain_24", "DLCL, 6 layers": "dlcl_6", "DLCL, 24 layers": "dlcl_24"}),
    "control-task": lambda: of_runs("control-task", [*SCORES[:-1], "source gain"], {
        "2 layers": "pre_2", "8 layers": "pre_8"}),
    "dlcl-ablations": lambda: of_runs("dlcl-ablations", ["parameters", "valid loss", "BLEU", "chrF"], {
        "DLCL": "dlcl_20", "`--dlcl-no-norm`": "nonorm", "`--dlcl-fixed --dlcl-no-norm` (1/N)": "thirdnonorm",
        "`--dlcl-fixed` (1/N)": "third", "`--dlcl-init one --dlcl-fixed`": "one", "plain pre-norm": "pre_20"}),
    "modern": lambda: of_runs(
        "modern-methods", ["rate", "parameters", "valid loss, mean", "BLEU", "over plain", "p (Holm)"], MODERN),
    "lstm": lambda: of_runs("lstm", ["parameters", "valid loss", "BLEU", "chrF", "source gain"], {
        f"{name}, {layers}": f"{key}{suffix}" for name, key in (("plain pre-norm", "pre"), ("depth-wise LSTM", "lstm"))
        for layers, suffix in (("3 + 3", "_3_3"), ("6 + 6", "_6"), ("12 + 12", "_12_12"))}),
    "twelve": lambda: of_runs("twelve", ["seeds", "parameters", "valid loss", "BLEU", "BLEU, reporting half"], {
        "CompleteP": "completep", "DLCL": "dlcl", "depth-wise LSTM": "lstm", "plain pre-norm": "pre",
        "post-norm, DS-Init, rate 0.0005": "ds"}),
    "six": lambda: of_runs("six", ["seeds", "parameters", "valid loss", "BLEU", "over plain", *REPORTED], {
        "`transformer_modern_6l`": "modern", "CompleteP": "completep", "DLCL": "dlcl", "depth-wise LSTM": "lstm",
        "plain pre-norm": "pre", "12 + 1, `transformer_modern_12l1l`": "modern_12_1",
        "the same, taught by `transformer_modern_6l`": "modern_12_1_taught"}),
    "six-24": lambda: of_runs("six-24", ["seeds", "valid loss", "BLEU", "over plain", "chrF", "BLEU, reporting half"], {
        "`transformer_modern_6l`": "modern", "plain pre-norm": "pre",
        "12 + 1, `transformer_modern_12l1l`": "modern_12_1"}),
    "post-norm": lambda: of_runs("ds-init-one-stack", ["parameters", "valid loss", "BLEU", "source gain"], {
        "DS-Init in both stacks": "ds_12", "the same, merged attention": "matt_ds_12",
        "merged attention, DS-Init in the encoder, clipped": "matt_ds_encoder_12_clipped",
        "merged attention, DS-Init in the decoder, clipped": "matt_ds_decoder_12_clipped"}),
    "deep-shallow": lambda: of_runs("deep-shallow", ["seeds", "parameters", "valid loss", "BLEU", "chrF"], {
        "6 + 6, `transformer_modern_6l`": "6+6 modern", "6 + 6, plain, R-Drop": "6+6 plain, R-Drop",
        "6 + 6, plain": "6+6 plain", "12 + 1, `transformer_modern_12l1l`": "12+1 modern",
        "12 + 1, CompleteP": "12+1 CompleteP", "the same, rate 0.004": "12+1 CompleteP 0.004",
        "the same, taught by plain 6 + 6": "12+1 CompleteP, distilled", "12 + 1, plain": "12+1 plain",
        "12 + 1, plain, taught by plain 6 + 6": "12+1 plain, distilled"}),
    "speeds": lambda: of_speeds({"": "real"}, SHALLOW, {
        **INT8, **OF_STOCK, "int8, CTranslate2 = 1": OF_BOTH["int8, CTranslate2 = 1"],
        "BLEU": ("", "bleu", 2), "BLEU in int8": ("-int8", "bleu", 2)}),
    "speeds-one": lambda: of_speeds({"": "real-one"}, SHALLOW, {
        **INT8, **OF_STOCK, "int8, CTranslate2 = 1": OF_BOTH["int8, CTranslate2 = 1"]}),
    "decoders": lambda: of_speeds({"": "random"}, DECODERS, {**INT8, **OF_BOTH}),
    "avx2": lambda: of_speeds({"": "random-avx2"}, ENGINES, OF_BOTH),
}  # fmt: skip


def rendered(text):
    """Return the text of a page with all of its tables computed."""
    return TABLE.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n<!-- end -->", text)


def hours():
    """Return the hours of training on one CPU core in all records, each run once."""
    found = {(run.get("train_hours"), run.get("valid_loss")): run
             for path in sorted(RECORDS.glob("*.jsonl")) if path.stem != "decoding"
             for system in runs(path.stem).values() for run in system.values()}  # fmt: skip
    return sum(run.get("train_hours") or 0 for run in found.values() if "H100" not in run["hardware"])


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if rendered(before) != before:
            page.write_text(rendered(before), encoding="utf-8")
            print(page.relative_to(ROOT))
    print(f"hours of training on one CPU core: {hours():.1f}")
