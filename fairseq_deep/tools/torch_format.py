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

import base64
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.runtime.text import is_pieces
from fairseq_deep.runtime.verification import Limits, Reference, normalised, padded, shifted
from fairseq_deep.tools.card import counts, make_export_card, versions
from fairseq_deep.tools.trained import Format, Trained

FORMAT, VERSION = "fairseq_deep torch.export", 1
CAPACITY = 256
"""Default number of target positions; time and memory of a step grow with it."""
NAMES = ("fairseq_deep", "torch")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Maximum difference of log-probabilities by the type of the weights, relative to the largest one if that is above 1;
in half precision, eight units in the last place."""
SHARE = 0.995
"""Share of translations that must be equal in fp32."""


class TorchExport(Format):
    """A file with two programs.

    Raises:
        UsageError: the model cannot be exported, or this torch is too old
    """

    program = "torch.export"

    def __init__(self, trained: Trained):
        super().__init__(trained)
        args, model = trained.args, trained.loaded.model
        self.archives = check_package()
        trained.search["beam"] = args.beam or trained.search["beam"]
        dtype = getattr(torch, args.dtype or "float32")
        model.to(dtype)
        self.max_target = args.capacity or min(CAPACITY, model.decoder.max_positions())
        self.programs = export(model, trained.search["beam"], self.max_target, trained.path)
        self.settings = describe(self.programs, trained, self.max_target)
        self.made = f"beam {trained.search['beam']}, {self.max_target} positions"
        self.limits = Limits(TOLERANCES[dtype], None, SHARE if dtype == torch.float32 else None, own_search=True)

    def write(self, path: str) -> None:
        """See :class:`Format`."""
        loaded, settings = self.trained.loaded, self.settings
        extra = {"model.json": json.dumps(settings, indent=1, ensure_ascii=False)}
        facts = counts(loaded, loaded.model.state_dict())
        facts["positions"] = f"at most {self.max_target} target tokens and {settings['max_source']} source tokens"
        extra |= {
            **_texts(loaded, self.trained.bundle),
            "README.md": make_export_card(self.trained, "torch", NAMES, facts),
        }
        for program in self.programs.values():
            program.example_inputs = None  # their caches are as large as the model
        try:
            with open(path, "wb+") as file:
                self.archives.package_pt2(file, exported_programs=self.programs, extra_files=extra)
        except RuntimeError as error:  # raised by torch on a full disk
            raise UsageError(f"cannot write {self.trained.args.output}: {one_line(error)}") from error

    def open(self, path: str, options: SearchOptions) -> "Programs":
        """See :class:`Format`."""
        with open(path, "rb") as file:
            content = self.archives.load_pt2(file)
        if json.loads(content.extra_files["model.json"]) != self.settings:
            raise UsageError("the written file differs when read back; check the disk")
        encode, step = (content.exported_programs[name].module() for name in ("encoder", "step"))
        return Programs(ProgramModel(encode, step, self.settings), options)


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


def describe(programs: dict[str, Any], trained: Trained, capacity: int) -> dict[str, Any]:
    """Return the description of the *programs* for a search.

    A shape consists of numbers and the names "sentences" and "words" (of a batch of sources). Tensors in dictionaries
    are listed as "source.NAME" and "caches.NAME".
    """
    inputs, scores, loaded = *_tensors(programs["step"]), trained.loaded
    sources = [entry for entry in inputs if entry["name"].startswith("source.")]
    caches = [entry for entry in inputs if entry["name"].startswith("caches.")]
    tokens = {"name": "src_tokens", "shape": ["sentences", "words"], "dtype": "int64"}
    return {
        "format": FORMAT,
        "version": VERSION,
        **dict(zip(("source_lang", "target_lang"), map(short_code, trained.languages))),
        "text": {**trained.text, "tags": trained.steps.tags(loaded.source.symbols[len(SPECIAL) :])},
        "search": trained.search,
        "capacity": capacity,
        "max_source": trained.facts.max_source,
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


class ProgramModel:
    """Adapter of two programs to the model interface of `BeamSearch`.

    Args:
        encode, step: the programs
        settings: their description (`describe`)
    """

    def __init__(self, encode: Callable, step: Callable, settings: dict[str, Any]):
        self._encode, self.step, self.decoder = encode, step, self
        self.beam, self.capacity = settings["search"]["beam"], settings["capacity"]
        # the dimension of sentences in each cache
        self.dims = {
            entry["name"].partition(".")[2]: entry["shape"].index("sentences")
            for entry in settings["programs"]["step"]["inputs"]
            if entry["name"].startswith("caches.")
        }

    def encoder(self, src_tokens: Tensor) -> dict[str, Any]:
        """Encode a batch (B x S)."""
        source, caches = self._encode(src_tokens)
        return {"encoder_out": [source["padding"]], "source": source, "caches": caches}

    def max_positions(self) -> int:
        """Return the number of positions in the caches."""
        return self.capacity

    def start(self, encoder_out: dict[str, Any], *_: Any) -> "ProgramState":
        """Return the state before the first position."""
        return ProgramState(self, encoder_out["source"], encoder_out["caches"])


class ProgramState:
    """State of incremental decoding with programs; the interface is `DecodingState`'s."""

    def __init__(self, model: ProgramModel, source: dict[str, Tensor], caches: dict[str, Tensor]):
        self.model, self.source, self.caches, self.position, self.rows = model, source, caches, 0, 1
        self.order = torch.zeros(len(source["padding"]), model.beam, dtype=torch.long)

    def step(self, words: Tensor) -> tuple[Tensor, None]:
        """Return the scores (rows x V) of the next token; the first step has a row per sentence, others have a beam."""
        words = words.view(-1, self.rows).expand(-1, self.model.beam).contiguous()
        position = torch.tensor([self.position])
        scores, self.caches = self.model.step(words, self.order, position, self.source, self.caches)
        self.position += 1
        return scores[:, : self.rows].flatten(0, 1), None

    def reorder(self, order: Tensor) -> None:
        """Reorder the caches to the hypotheses *order*, which are grouped by sentence."""
        order = order.view(-1, self.model.beam)
        sentences = order[:, 0] // self.rows
        self.order, self.rows = order % self.rows, self.model.beam
        self.source = {name: x.index_select(0, sentences) for name, x in self.source.items()}
        self.caches = {name: x.index_select(self.model.dims[name], sentences) for name, x in self.caches.items()}


class Programs(Reference):
    """Programs as one side of a comparison."""

    def log_probabilities(self, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """See :class:`Reference`."""
        inputs, model, steps = shifted(targets), self.model, []
        state = model.start(model.encoder(padded(sentences)))
        state.rows = model.beam
        for words in inputs.t():
            scores, _ = state.step(words.repeat_interleave(model.beam))
            steps.append(scores.view(len(words), model.beam, -1)[:, -1])
        return normalised(torch.stack(steps, 1)[inputs.ne(Dictionary.pad)])
