"""Export of a trained model to two programs of ``torch.export`` in one file, with a check.

The file is torch's PT2 archive. Its programs are ``encoder`` and ``step`` (`fairseq_deep.core.torch_export`), and its
extra files contain everything that a search requires:

| file | content |
|---|---|
| ``model.json`` | the result of `describe` |
| ``source.txt``, ``target.txt`` | the dictionaries: line n is the token with the index n, from 0 |
| ``codes`` | subword-nmt merges, if used |
| ``spm.model.base64`` | a SentencePiece model, if used |
| ``README.md`` | a card |
"""

import argparse
import base64
import json
import os
import warnings
from typing import Any, BinaryIO

import torch

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime.dictionary import SPECIAL
from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.runtime.loading import ModelFacts
from fairseq_deep.runtime.text import is_pieces
from fairseq_deep.tools import torch_check, translate
from fairseq_deep.tools.card import counts, make_export_card, versions
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_output_path, replacing

FORMAT, VERSION = "fairseq_deep torch.export", 1
CAPACITY = 256
"""Default number of target positions; time and memory of a step grow with it."""
NAMES = ("fairseq_deep", "torch")
USE = """## Use

`load_pt2` of `torch.export.pt2_archive._package` returns this file's programs and extra files (torch 2.8 or newer).
Loading runs code from the file, so load only files that you trust. `model.json` describes the inputs and outputs. A
search calls `encoder` once and `step` per target position:

```python
source, caches = encoder(src_tokens)  # sentences x words, padded
scores, caches = step(words, order, position, source, caches)
```

`words` has the last token of each hypothesis, initially `</s>`. `order` has the previous rank of each hypothesis,
initially 0. `position` starts at 0. Inputs must be contiguous. `examples/translate_pt2.py` in the repository of
fairseq_deep is a beam search that requires only torch."""


def check_package() -> Any:
    """Return torch's module for archives of several programs.

    Raises:
        UsageError: this torch does not have the module
    """
    try:
        from torch.export.pt2_archive import _package  # package_pt2 and load_pt2 are documented under this name
    except ImportError as error:
        problem = f"--format torch requires torch 2.8 or newer, but this is {torch.__version__}"
        raise UsageError(f"{problem}: pip install 'torch>=2.8'") from error
    return _package


def write(args: argparse.Namespace) -> int:
    """Write the file, and compare its programs with the model."""
    from fairseq_deep.runtime import load_model, search_of
    from fairseq_deep.runtime.verification import token_rows

    archives = check_package()
    check_new_file(args.output)
    given = args.verify and [args.verify, *read_lines(args.verify)]
    bundle = translate.find_parts(args.checkpoint, args)
    loaded = load_model(bundle)
    steps = bundle.text_steps(loaded.source_lang, loaded.target_lang, loaded.source)
    search = {**search_of(bundle), "gnmt_lenpen": bundle.gnmt_lenpen}
    search["beam"] = args.beam or search["beam"]
    loaded.model.to(getattr(torch, args.dtype or "float32"))
    capacity = args.capacity or min(CAPACITY, loaded.model.decoder.max_positions())
    limit = loaded.model.encoder.max_positions()
    origin, rows = token_rows(bundle, loaded, steps, args.verify_sentences, limit, given)
    programs = export(loaded.model, search["beam"], capacity, bundle.checkpoint)
    settings = describe(programs, loaded, bundle, steps, search, capacity)
    extra = {"model.json": json.dumps(settings, indent=1, ensure_ascii=False), **_texts(loaded, bundle)}
    facts = counts(loaded, loaded.model.state_dict())
    facts["positions"] = f"at most {capacity} target tokens and {settings['max_source']} source tokens"
    extra["README.md"] = make_export_card(args, loaded, settings["text"], settings["search"], NAMES, facts, USE)
    for program in programs.values():
        program.example_inputs = None  # their caches are as large as the model
    with replacing(args.output) as temporary:
        try:
            with open(temporary, "wb+") as file:
                archives.package_pt2(file, exported_programs=programs, extra_files=extra)
        except RuntimeError as error:  # raised by torch on a full disk
            raise UsageError(f"cannot write {args.output}: {one_line(error)}") from error
        with open(temporary, "rb") as file:
            report = _check(archives, file, settings, loaded.model, rows)
    print(f"{bundle.checkpoint} -> {args.output}: beam {search['beam']}, {capacity} positions; {report} ({origin})")
    return 0


def check_new_file(path: str) -> None:
    """Raise `UsageError` if no new file with the suffix of torch's archives can be written at `path`."""
    if not path.endswith(".pt2"):
        raise UsageError(f"--output {path} must end in .pt2, torch's suffix of the format")
    if os.path.lexists(path):
        raise UsageError(f"cannot write {path}: it exists; give another name")
    check_output_path(path)


def export(model: Any, beam: int, capacity: int, path: str) -> dict[str, torch.export.ExportedProgram]:
    """Return the programs of *model*.

    Args:
        beam, capacity: hypotheses per sentence, and target positions
        path: path of the model, for messages

    Raises:
        UsageError: the model cannot be exported
    """
    from fairseq_deep.core.torch_export import export_decoding_step, export_encoder

    most = model.decoder.max_positions()
    if capacity > most:
        raise UsageError(f"--capacity {capacity} exceeds the {most} positions of {path}: choose 1 to {most}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about torch's internals
            step = export_decoding_step(model, beam, capacity)
            return {"encoder": export_encoder(model, beam, capacity), "step": step}
    except UsageError:
        raise
    except Exception as error:  # torch raises arbitrary exceptions for code that it cannot trace
        raise UsageError(f"torch {torch.__version__} cannot export {path}: {one_line(error)}") from error


def describe(
    programs: dict[str, Any], loaded: Any, bundle: Any, steps: Any, search: dict[str, Any], capacity: int
) -> dict[str, Any]:
    """Return the description of the *programs* for a search.

    A shape consists of numbers and the names "sentences" and "words" (of a batch of sources). Tensors in dictionaries
    are listed as "source.NAME" and "caches.NAME".
    """
    inputs, scores = _tensors(programs["step"])
    sources = [entry for entry in inputs if entry["name"].startswith("source.")]
    caches = [entry for entry in inputs if entry["name"].startswith("caches.")]
    tokens = {"name": "src_tokens", "shape": ["sentences", "words"], "dtype": "int64"}
    return {
        "format": FORMAT,
        "version": VERSION,
        "source_lang": short_code(loaded.source_lang),
        "target_lang": short_code(loaded.target_lang),
        "text": {"tokenizer": bundle.tokenizer, "lowercase": bundle.lowercase, "sub_words": steps.kind,
                 "tags": steps.tags(loaded.source.symbols[len(SPECIAL) :])},
        "search": search,
        "capacity": capacity,
        "max_source": ModelFacts.of([loaded]).max_source,
        "special": {name: getattr(loaded.target, name) for name in ("bos", "pad", "eos", "unk")},
        "programs": {
            "encoder": {"inputs": [tokens], "outputs": [*sources, *caches]},
            "step": {"inputs": inputs, "outputs": [scores, *caches]},
        },
        "made_with": versions(NAMES),
    }


def _tensors(step: torch.export.ExportedProgram) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return names, shapes and types of the step's inputs, in order, and of its scores."""
    values = {node.name: node.meta["val"] for node in step.graph.nodes if node.op == "placeholder"}
    tensors = [values[name] for name in step.graph_signature.user_inputs]
    sizes = {str(tensors[0].shape[0]): "sentences", str(tensors[3].shape[3]): "words"}
    source, caches = step.example_inputs[0][3:]
    names = ["words", "order", "position"]
    names += [*(f"source.{name}" for name in source), *(f"caches.{name}" for name in caches)]

    def entry(name: str, value: Any) -> dict[str, Any]:
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in value.shape]
        return {"name": name, "shape": shape, "dtype": str(value.dtype).partition(".")[2]}

    scores = next(node for node in step.graph.nodes if node.op == "output").args[0][0].meta["val"]
    return [entry(*each) for each in zip(names, tensors, strict=True)], entry("scores", scores)


def _texts(loaded: Any, bundle: Any) -> dict[str, str]:
    """Return the dictionaries and the sub-word model."""
    sides = {"source": loaded.source, "target": loaded.target}
    texts = {f"{side}.txt": "".join(f"{word}\n" for word in each.symbols) for side, each in sides.items()}
    if bundle.codes is not None:
        with open(bundle.codes, "rb") as file:
            content = file.read()
        if is_pieces(bundle.codes):  # extra files must be text
            texts["spm.model.base64"] = base64.b64encode(content).decode()
        else:
            texts["codes"] = content.decode("utf-8-sig")
    return texts


def _check(
    archives: Any, file: BinaryIO, settings: dict[str, Any], model: Any, rows: list[list[int]]
) -> Any:
    """Read the file like a user, and return the result of the check."""
    content = archives.load_pt2(file)
    encode, step = (content.exported_programs[name].module() for name in ("encoder", "step"))
    if json.loads(content.extra_files["model.json"]) != settings:
        raise UsageError("the written file differs when read back; check the disk")
    return torch_check.check_programs((encode, step), settings, model, rows)
