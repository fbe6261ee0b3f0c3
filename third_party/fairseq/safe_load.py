"""Loads checkpoints and their options without running code in them.

A checkpoint is a pickle, and a pickle can call any function. Here it can only name what fairseq's checkpoints contain:
tensors, plain containers, and the types of `allowed_types`. Some options in checkpoints are Python expressions, such as
the layers of a convolutional model; `evaluate` computes them without `eval`.
"""

import ast
import contextlib
import importlib
import logging
import operator
import os
import pickle
import re
import tarfile
import types
import zipfile

import numpy as np
import torch
from fairseq.safe_exit import OneLineError

logger = logging.getLogger(__name__)

OPT_OUT = "FAIRSEQ_DEEP_UNSAFE_LOAD"
# In torch 2.4 to 2.6, entries of safe_globals cannot have another name than their own.
NAMED_SAFE_GLOBALS = torch.__version__ >= (2, 7)

# Only plain data types: a checkpoint can call an entry with any arguments and set any attributes. So no entry may act
# on its arguments (no getattr, no functools.partial, nothing that imports, opens or evaluates).
NAMES = {
    "argparse": ["Namespace"],
    "builtins": ["bool", "dict", "float", "int", "list", "set", "str", "tuple"],
    "collections": ["Counter", "OrderedDict", "defaultdict"],
    "typing": ["Any"],
    "fairseq.distributed.utils": ["_TensorPlaceholder"],
    "fairseq.logging.meters": ["AverageMeter", "StopwatchMeter", "SumMeter", "TimeMeter"],
    "fairseq.meters": ["AverageMeter", "StopwatchMeter", "TimeMeter"],  # their module until fairseq 0.9
    "omegaconf.base": ["ContainerMetadata", "Metadata"],
    "omegaconf.dictconfig": ["DictConfig"],
    "omegaconf.listconfig": ["ListConfig"],
    "omegaconf.nodes": ["AnyNode", "BooleanNode", "FloatNode", "IntegerNode", "StringNode"],
}
# Allowed by torch's weights-only loader; our loader for older torch needs them in the list.
TENSOR_NAMES = {
    "torch": ["Size", "device"],
    "torch._utils": ["_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2"],
}


FORMATS = {}
"""Readers of checkpoints that are not pickles, by file name extension: plugins add functions of the path."""


class CheckpointError(OneLineError, pickle.UnpicklingError):
    """A checkpoint was rejected or cannot be read; the message is one line."""


def load(f, map_location="cpu"):
    """Load a checkpoint like `torch.load`, also from an untrusted source.

    Args:
        f: path, or binary file open for reading
        map_location: as in `torch.load`

    Raises:
        CheckpointError: the checkpoint names a type, a function or a component of fairseq that is not allowed, or is
            corrupt
        Exception: raised by the reader of another format
    """
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as opened:
            return load(opened, map_location)
    name = getattr(f, "name", "received checkpoint")
    ending = os.path.splitext(str(name))[1]
    if ending in FORMATS:
        return FORMATS[ending](name)
    if ending == ".safetensors":
        raise CheckpointError(f"{name}: fairseq cannot read this format: add the --user-dir of its package")
    if os.environ.get(OPT_OUT) == "1":
        return torch.load(f, map_location=map_location, weights_only=False)
    from fairseq.safe_settings import shown

    start = f.tell()
    allowed = allowed_types()
    try:
        refuse_archive(f)
        state = (load_weights_only if NAMED_SAFE_GLOBALS else load_restricted)(f, map_location, allowed)
    except Exception as error:
        refused = refused_names(f, start, allowed, error)
        if refused:
            raise CheckpointError(
                f"{name}: rejected, because it contains {', '.join(map(shown, refused))}, which can run code when "
                f"loaded; if you trust its source, set {OPT_OUT}=1"
            ) from error
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip().splitlines() or ["no more data"]
        reason = f"{type(error).__name__}: {shown(reason[0])}"
        raise CheckpointError(
            f"{name}: not a readable checkpoint, perhaps incomplete or corrupt ({reason})"
        ) from error
    return with_own_files(name, state)


def with_own_files(name, state):
    """Return the checkpoint `state` of the file `name` with safe settings.

    Raises:
        CheckpointError: a setting has a value that is not allowed
    """
    from fairseq import safe_settings

    folder = os.path.dirname(os.path.abspath(name)) if isinstance(name, str) and os.path.exists(name) else ""
    try:
        beyond = safe_settings.refused(state)
        dropped = [] if beyond else safe_settings.drop(state, folder)
    except Exception as error:  # hostile containers can raise any exception
        raise CheckpointError(f"{name}: the settings in it cannot be read ({type(error).__name__})") from error
    if beyond:
        raise CheckpointError(
            f"{name}: rejected, because of its settings: {', '.join(beyond)} (allowed are text tasks and their "
            "components, sizes and dropout in their ranges, and no references); if you trust its source, "
            f"set {OPT_OUT}=1"
        )
    if dropped:
        logger.warning(
            f"{name}: ignored settings, because a checkpoint may not name files: {', '.join(dropped)}; "
            "if they are needed, give them as options, or put the files next to the checkpoint"
        )
    return state


def allowed_types():
    """Return what a checkpoint may name in addition to tensors, by full name."""
    allowed = {}
    for module_name, names in NAMES.items():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            allowed.update({f"{module_name}.{name}": getattr(module, name) for name in names if hasattr(module, name)})
    from fairseq.dataclass import FairseqDataclass

    waiting = [FairseqDataclass]
    while waiting:
        config = waiting.pop()
        allowed[f"{config.__module__}.{config.__qualname__}"] = config
        waiting += config.__subclasses__()
    allowed["_codecs.encode"] = latin1_bytes
    allowed["numpy.dtype"] = NumericType
    allowed["numpy.ndarray"] = NumericArray
    for module_name in ("numpy.core.multiarray", "numpy._core.multiarray"):  # the latter since numpy 2
        allowed[f"{module_name}.scalar"] = numeric_scalar
        allowed[f"{module_name}._reconstruct"] = NumericArray
    return allowed


def load_weights_only(f, map_location, allowed):
    with allowing(allowed):
        return torch.load(f, map_location=map_location, weights_only=True)


@contextlib.contextmanager
def allowing(allowed):
    """Allow names in torch's loader within a context; the user's own entries remain."""
    known = torch.serialization.get_safe_globals()
    entries = [(value, name) for name, value in allowed.items()]
    with torch.serialization.safe_globals([entry for entry in entries if entry not in known]):
        yield


def load_restricted(f, map_location, allowed):
    """Load with an old torch, whose weights-only loader accepts no further names."""
    allowed = dict(allowed)
    for module_name, names in TENSOR_NAMES.items():
        module = importlib.import_module(module_name)
        allowed.update({f"{module_name}.{name}": getattr(module, name) for name in names})
    allowed.update({str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)})
    restricted = type("Restricted", (RestrictedUnpickler,), {"allowed": allowed})
    module = types.SimpleNamespace(Unpickler=restricted, load=lambda f, **options: restricted(f, **options).load())
    # torch.load of torch 1.13 ignores its argument pickle_module, so this calls the functions below it.
    if torch.serialization._is_zipfile(f):
        with torch.serialization._open_zipfile_reader(f) as archive:
            return torch.serialization._load(archive, map_location, module, encoding="utf-8")
    return torch.serialization._legacy_load(f, map_location, module, encoding="utf-8")


class RefusedName(pickle.UnpicklingError):
    """A name is not in the allow-list; the message is its full name."""


class RestrictedUnpickler(pickle._Unpickler):  # the Python class, whose instructions can be overridden
    allowed = {}
    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module, name):
        if module == "__builtin__":
            module, name = "builtins", {"long": "int", "unicode": "str"}.get(name, name)
        full_name = f"{module}.{name}"
        if full_name not in self.allowed:
            raise RefusedName(full_name)
        return self.allowed[full_name]

    def load_build(self):
        if isinstance(self.stack[-2], (type, types.FunctionType, types.BuiltinFunctionType)):
            raise RefusedName(f"a change of {self.stack[-2].__qualname__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def refuse_archive(f):
    """Reject the two old formats that torch does not only unpickle: tar files and TorchScript."""
    start = f.tell()
    with contextlib.suppress(tarfile.TarError):
        tarfile.open(fileobj=f, mode="r:").close()
        raise RefusedName("the tar format of torch 0.1")
    f.seek(start)
    is_zip = f.read(4) == b"PK\x03\x04"
    if is_zip and any(name.endswith("/constants.pkl") for name in zipfile.ZipFile(f).namelist()):
        raise RefusedName("TorchScript")
    f.seek(start)


def refused_names(f, start, allowed, error):
    """Return the names that made `error` reject `f`, without running anything; empty for another reason."""
    if isinstance(error, RefusedName):
        return [str(error)]
    with contextlib.suppress(Exception), allowing(allowed):
        f.seek(start)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))
    # an old file format, or pickle instructions that torch.save does not write
    found = re.search(r"GLOBAL (\S+)|unrecognized function (\S+)|operand (\d+)", str(error))
    f.seek(start)
    if not found or f.read(1) not in (b"P", b"\x80"):  # neither a zip file nor a pickle
        return []
    return [found[1] or found[2] or f"pickle instruction {found[3]}"]


def latin1_bytes(text, encoding="latin1"):
    """Return the bytes that a pickle of protocol 2 stores as text."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding}")
    return text.encode("latin1")


class NumericType:
    """Replaces numpy's dtype, whose state can make numpy read and write outside its memory."""

    def __init__(self, name, align=False, copy=False):
        if not re.fullmatch(r"[biufc]\d{1,2}", name):
            raise ValueError(f"numpy type {name!r} is not a number")
        self.dtype = np.dtype(name)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


def numeric_scalar(kind, data):
    return np.frombuffer(data, kind.dtype, count=1)[0]


class NumericArray(np.ndarray):
    """An array of numbers; pickled again as a plain array."""

    def __new__(cls, *unused):
        return super().__new__(cls, 0)

    def __setstate__(self, state):
        _, shape, kind, column_major, data = state
        super().__setstate__((1, shape, kind.dtype, bool(column_major), data))

    def __reduce__(self):
        return self.view(np.ndarray).__reduce__()


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression):
    """Evaluate an expression of literals, brackets and + - * /, such as "[(512, 3)] * 4".

    Values that are not text are returned as they are: checkpoints store some settings already evaluated.

    Raises:
        ValueError: the expression contains anything else
    """
    if not isinstance(expression, str):
        return expression
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, TypeError):
        raise ValueError(f"not an expression of numbers, strings and lists: {expression}") from None


def value_of(node):
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        values = [value_of(element) for element in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict):
        return {value_of(key): value_of(value) for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise TypeError
