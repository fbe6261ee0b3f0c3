"""Where can a model of each method go? Every method is exported in every way, and compared with the model itself.

    pip install 'transformers>=5' 'ctranslate2>=4.7' onnx onnxscript onnxruntime
    python benchmarks/portability.py --write      # docs/portability.json, and the table of docs/portability.md
    python benchmarks/portability.py --new --write     # only what the record lacks

Models have 2 + 2 layers, width 16 and random weights. Differences are those that the exports
themselves report, of logits or log-probabilities; for a package they are of the scores of eight random sentences.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.export.pt2_archive._package import load_pt2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fairseq_deep import cli as tools  # noqa: E402
from fairseq_deep.core.description import describe  # noqa: E402
from fairseq_deep.core.search import SearchOptions  # noqa: E402
from fairseq_deep.errors import UsageError  # noqa: E402
from fairseq_deep.runtime import find_bundle, load_model  # noqa: E402
from fairseq_deep.runtime.verification import Limits, Reference, compare  # noqa: E402
from fairseq_deep.tools.export import DEEP, OTHERS  # noqa: E402
from fairseq_deep.tools.torch_format import ProgramModel, Programs  # noqa: E402
from tests.helpers.docs import code_of  # noqa: E402
from tests.helpers.exports import write_model  # noqa: E402
from tests.helpers.methods import METHODS  # noqa: E402
from tests.helpers.models import make_dictionary, make_tagged_dictionary  # noqa: E402

RECORD, PAGE = ROOT / "docs/portability.json", ROOT / "docs/portability.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEADS = {
    "method": "method",
    "class": "class of transformers",
    "library": "transformers with `fairseq_deep`",
    "ctranslate2": "CTranslate2",
    "torch": "`.pt2`",
    "onnx": "ONNX",
    "package": "package",
}
POSTNORM = {"layernorm_embedding": True, "encoder_learned_pos": True, "decoder_learned_pos": True}
MORE = {
    "post-norm": ("postnorm_6l", {}),
    "post-norm, `--layernorm-embedding`, learned positions": ("postnorm_6l", POSTNORM),
    "`--relative-positions`": ("prenorm_6l", {"relative_positions": 2, "no_token_positional_embeddings": True}),
    "`--layer-agg dlcl` with residual weights": ("prenorm_6l", {
        "layer_agg": "dlcl", "dlcl_no_norm": True, "dlcl_init": "last"}),
    "`--layer-agg hyper-connections`, mHC": ("prenorm_6l", {
        "layer_agg": "hyper-connections", "hyper_connections_kind": "manifold"}),
    "`--norm rms --ffn swiglu --rotary-positions`": ("prenorm_6l", {
        "norm": "rms", "ffn": "swiglu", "rotary_positions": True}),
    "`--decoder-kv-heads 1`": ("prenorm_6l", {"decoder_kv_heads": 1}),
    "`--qk-norm`": ("prenorm_6l", {"qk_norm": True}),
    "`--attention-gate features`": ("prenorm_6l", {"attention_gate": "features"}),
    "`--sub-norm`": ("prenorm_6l", {"sub_norm": True}),
    "`--value-residual`": ("prenorm_6l", {"value_residual": True}),
    "`--language-transform`": ("prenorm_6l", {"language_transform": True}),
    "`--language-norm`": ("prenorm_6l", {"language_norm": True}),
}  # fmt: skip
"""Systems in addition to the methods of the registries."""


def systems():
    """``{row: (architecture without transformer_, flags)}``; methods that are the default make no row of their own."""
    found = {"plain pre-norm": ("prenorm_6l", {})}
    for name, (architecture, flags) in METHODS.items():
        axis, _, method = name.partition("-")
        norm = "postnorm" if "postnorm" in architecture else "prenorm"
        if method not in ("residual", "plain", "self", "last"):
            found[f"`--{axis.replace('_', '-')} {method}`"] = (f"{norm}_6l", flags)
    return {**found, **MORE}


def command(*words):
    """Run ``fairseq-deep``; exit status, output and errors."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = tools.main([*map(str, words)])
    return code, out.getvalue(), err.getvalue()


def make_model(folder, name, flags):
    """Save a model whose branches have grown, and return it."""
    has_tags = {"language_transform", "language_norm"} & {*flags}
    source = make_tagged_dictionary(38, 20) if has_tags else make_dictionary(38, "s")
    model = write_model(folder, name, [source, make_dictionary(38, "t")], **{"decoder_layers": 2, **flags})
    model.set_num_updates(10**6)
    state = torch.load(folder / "model.pt", weights_only=False)
    torch.save({**state, "model": model.state_dict()}, folder / "model.pt")
    return model.eval()


@torch.no_grad()
def compared(model, other):
    """The greatest difference between the scores that two functions give to random sentences."""
    draw = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, 38, (8, length), generator=draw) for length in (9, 7))
    ends = torch.full((8, 1), 2)
    pair = torch.cat([source, ends], 1), torch.cat([ends, target], 1)
    return float((model(*pair) - other(*pair)).abs().max())


def scores_of(model):
    return lambda source, inputs: model(source, torch.full((len(source),), source.size(1)), inputs)[0]


def of_export(folder, form, *more):
    """What ``export`` reports: a difference and a class, or why there is no such export."""
    out = folder / (f"{form}.pt2" if form == "torch" else form)
    code, said, err = command("export", folder / "model.pt", "--format", form, "--output", out, *more)
    if code:
        reason = re.sub(rf"({re.escape(DEEP)})?; (or )?{re.escape(OTHERS)}$", "", err.strip().splitlines()[-1])
        return {"no": re.sub(r"^fairseq-deep export: (\S*model\.pt( has|:)? ?)?", "", reason)}
    kind = re.search(r"(\w+)(?:ForConditionalGeneration|MTModel)", said)
    return {"difference": float(re.search(r"within ([\d.e+-]+)", said)[1]), "class": kind[1] if kind else ""}


def session(path, described):
    """The program in the file *path* as a function of tensors and dictionaries of them.

    Args:
        described: what the ``.pt2`` file says of the program
    """
    import numpy as np
    import onnxruntime

    opened = onnxruntime.InferenceSession(path)
    outputs = [entry["name"].split(".", 1) for entry in described["outputs"]]
    assert [each.name for each in opened.get_outputs()] == [entry["name"] for entry in described["outputs"]]

    def call(*inputs):
        flat = [tensor for each in inputs for tensor in (each.values() if isinstance(each, dict) else [each])]
        feed = {each.name: tensor.numpy() for each, tensor in zip(opened.get_inputs(), flat, strict=True)}
        groups = {}
        for (group, *rest), value in zip(outputs, opened.run(None, feed)):
            groups.setdefault(group, {})["".join(rest)] = torch.from_numpy(np.array(value))
        return [each[""] if "" in each else each for each in groups.values()]

    return call


def of_onnx(folder):
    """The programs of the ``.pt2`` file in onnxruntime, by the code of docs/tools/export-onnx.md."""
    file = folder / "torch.pt2"
    if not file.exists():
        return {"no": "there is no .pt2 file"}
    loaded = load_model(find_bundle(str(folder / "model.pt"), tokenizer="none"))
    shutil.copy(file, folder / "model.pt2")
    try:
        with contextlib.chdir(folder), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(code_of("docs/tools/export-onnx.md"), {})
    except Exception as error:  # torch raises any exception at what it cannot convert
        return {"no": f"torch {torch.__version__} cannot convert it ({type(error).__name__})"}
    with open(file, "rb") as opened:
        settings = json.loads(load_pt2(opened).extra_files["model.json"])
    programs = [session(str(folder / f"{name}.onnx"), settings["programs"][name]) for name in ("encoder", "step")]
    rows = torch.randint(4, 38, (8, 9), generator=torch.Generator().manual_seed(1))
    rows = [*torch.cat([rows, torch.full((8, 1), 2)], 1)]
    options = SearchOptions(**{**settings["search"], "max_len_a": 0, "max_len_b": settings["capacity"] - 1})
    theirs, limits = Programs(ProgramModel(*programs, settings), options), Limits(1e-5, own_search=True)
    try:
        report = compare("onnxruntime", Reference(loaded.model.eval(), options), theirs, rows, limits)
        return {"difference": report.difference}
    except UsageError as error:
        return {"no": str(error)}


def of_package(folder, model):
    """The package, and the same folder in transformers."""
    code, _, err = command("package", folder / "model.pt", "--tokenizer", "none", "--output", folder / "package")
    assert code == 0, err
    from transformers import AutoModelForSeq2SeqLM

    import fairseq_deep.huggingface  # noqa: F401 (registers its class)

    package = load_model(find_bundle(str(folder / "package"))).model.eval()
    found = AutoModelForSeq2SeqLM.from_pretrained(folder / "package", local_files_only=True).eval()
    own = scores_of(model)
    library = compared(own, lambda source, inputs: found(source, decoder_input_ids=inputs, use_cache=False).logits)
    return {"library": {"difference": library}, "package": {"difference": compared(own, scores_of(package))}}


def measure(name, flags):
    """``{target: {"difference": ..., "folded": ...} or {"no": reason}}`` of one system."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder, name, flags)
        found = {
            "class": of_export(folder, "huggingface"),
            "ctranslate2": of_export(folder, "ctranslate2"),
            "torch": of_export(folder, "torch", "--beam", "2", "--capacity", "16"),
            "onnx": of_onnx(folder),
            **of_package(folder, model),
        }
        plain = all(
            stack.residual.name in ("plain", "peri") and stack.aggregator.name == "residual"
            and not stack.init.method.connects
            for stack in describe(load_model(find_bundle(str(folder / "model.pt"))).stored.flags).values()
        )  # fmt: skip
    for target in ("class", "ctranslate2"):
        found[target]["folded"] = not plain and "no" not in found[target]
    return found


def cell(found):
    """A cell of the table."""
    if "no" in found:
        return "no"
    return "folded" if found.get("folded") else "yes"


def table(record):
    """The table of the page, in Markdown: the forms that lack some method, a row for methods with equal cells."""
    some = [target for target in list(HEADS)[1:] if any("no" in found[target] for found in record["systems"].values())]
    rows = {}
    for name, found in record["systems"].items():
        rows.setdefault(tuple(cell(found[target]) for target in some), []).append(name)
    lines = ["| " + " | ".join(map(HEADS.get, ("method", *some))) + " |", "|" + "---|" * (1 + len(some))]
    return "\n".join([*lines, *(f"| {'; '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items())])


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/portability.json and the page's table")
    parser.add_argument("--only", metavar="TEXT", help="the systems with TEXT in their names")
    parser.add_argument("--new", action="store_true", help="the systems that docs/portability.json lacks")
    args = parser.parse_args(words)
    known = json.loads(RECORD.read_text(encoding="utf-8"))["systems"]
    needed = ("transformers", "ctranslate2", "onnx", "onnxscript", "onnxruntime")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:  # a form whose package is missing would be recorded as one that the method does not have
        parser.error(f"requires {', '.join(missing)}; run: pip install {' '.join(missing)}")
    skipped = known if args.new else ()
    chosen = {name: each for name, each in systems().items() if (args.only or "") in name and name not in skipped}
    found = {name: measure(*system) for name, system in chosen.items()}
    print(table({"systems": found}))
    if args.write:
        found = {**known, **found}
        record = {"systems": {name: found[name] for name in systems() if name in found}}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
