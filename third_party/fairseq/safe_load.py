"""Loading of checkpoints and of their options without running code that is hidden in them.

A checkpoint is a pickle, and a pickle can call any function. Here it can only ask for what fairseq checkpoints hold:
tensors, plain containers, and the types that `allowed_types` lists. Some options that a checkpoint carries are Python
expressions, such as the layers of a convolutional model; `evaluate` computes them without `eval`.
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
# torch 2.4 to 2.6 have safe_globals, too, but there an entry cannot have a name other than its own.
NAMED_SAFE_GLOBALS = torch.__version__ >= (2, 7)

# Only plain data types: an entry may be called with any arguments and get any attributes, so none of them may act on
# what it is given (no getattr, no functools.partial, nothing that imports, opens or evaluates).
NAMES = {
    "argparse": ["Namespace"],
    "builtins": ["bool", "dict", "float", "int", "list", "set", "str", "tuple"],
    "collections": ["Counter", "OrderedDict", "defaultdict"],
    "typing": ["Any"],
    "fairseq.distributed.utils": ["_TensorPlaceholder"],
    "fairseq.logging.meters": ["AverageMeter", "StopwatchMeter", "SumMeter", "TimeMeter"],
    "fairseq.meters": ["AverageMeter", "StopwatchMeter", "TimeMeter"],  # their place until fairseq 0.9
    "omegaconf.base": ["ContainerMetadata", "Metadata"],
    "omegaconf.dictconfig": ["DictConfig"],
    "omegaconf.listconfig": ["ListConfig"],
    "omegaconf.nodes": ["AnyNode", "BooleanNode", "FloatNode", "IntegerNode", "StringNode"],
}
# What torch's own weights-only loader allows by itself and the one for older torch must be told.
TENSOR_NAMES = {
    "torch": ["Size", "device"],
    "torch._utils": ["_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2"],
}


FORMATS = {}
"""Readers of checkpoints that are no pickles, by the end of the name: a plugin adds a function of the path."""


class CheckpointError(OneLineError, pickle.UnpicklingError):
    """A checkpoint that was refused or cannot be read; the message is one line."""


def load(f, map_location="cpu"):
    """`torch.load` for checkpoints from anywhere.

    Args:
        f: path, or binary file open for reading
        map_location: as in `torch.load`

    Raises:
        CheckpointError: the checkpoint asks for a type, a function or a part of fairseq that is not allowed, or is
            damaged
        Exception: what the reader of another format raises
    """
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as opened:
            return load(opened, map_location)
    name = getattr(f, "name", "received checkpoint")
    ending = os.path.splitext(str(name))[1]
    if ending in FORMATS:
        return FORMATS[ending](name)
    if ending == ".safetensors":
        raise CheckpointError(f"{name}: fairseq itself cannot read this: add the --user-dir of its package")
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
                f"{name}: refused, because it asks for {', '.join(map(shown, refused))}, and loading that could run "
                f"code; if you trust whoever made this file, set {OPT_OUT}=1"
            ) from error
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip().splitlines() or ["no more data"]
        reason = f"{type(error).__name__}: {shown(reason[0])}"
        raise CheckpointError(
            f"{name}: not a readable checkpoint, maybe incomplete or damaged ({reason})"
        ) from error
    return with_own_files(name, state)


def with_own_files(name, state):
    """The checkpoint `state` of the file `name` with settings that may be used.

    Raises:
        CheckpointError: a setting asks for what is not allowed
    """
    from fairseq import safe_settings

    folder = os.path.dirname(os.path.abspath(name)) if isinstance(name, str) and os.path.exists(name) else ""
    try:
        beyond = safe_settings.refused(state)
        dropped = [] if beyond else safe_settings.drop(state, folder)
    except Exception as error:  # whatever the strangest containers raise
        raise CheckpointError(f"{name}: the settings in it cannot be read ({type(error).__name__})") from error
    if beyond:
        raise CheckpointError(
            f"{name}: refused, because of the settings in it: {', '.join(beyond)} (only text tasks and their parts are "
            f"allowed, no sizes or dropout out of range, no references); if you trust whoever made this file, "
            f"set {OPT_OUT}=1"
        )
    if dropped:
        logger.warning(
            f"{name}: not used, because settings of a checkpoint may not name files: {', '.join(dropped)}; "
            "name them yourself where they are needed, or put them next to it"
        )
    return state


def allowed_types():
    """Everything that a checkpoint may ask for beyond tensors, by full name."""
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
    """Tell torch what is allowed; entries that the user made stay when this ends."""
    known = torch.serialization.get_safe_globals()
    entries = [(value, name) for name, value in allowed.items()]
    with torch.serialization.safe_globals([entry for entry in entries if entry not in known]):
        yield


def load_restricted(f, map_location, allowed):
    """The same for torch whose weights-only loader cannot be told what is allowed."""
    allowed = dict(allowed)
    for module_name, names in TENSOR_NAMES.items():
        module = importlib.import_module(module_name)
        allowed.update({f"{module_name}.{name}": getattr(module, name) for name in names})
    allowed.update({str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)})
    restricted = type("Restricted", (RestrictedUnpickler,), {"allowed": allowed})
    module = types.SimpleNamespace(Unpickler=restricted, load=lambda f, **options: restricted(f, **options).load())
    # torch.load of torch 1.13 takes a pickle_module and then ignores it, so this calls what torch.load calls.
    if torch.serialization._is_zipfile(f):
        with torch.serialization._open_zipfile_reader(f) as archive:
            return torch.serialization._load(archive, map_location, module, encoding="utf-8")
    return torch.serialization._legacy_load(f, map_location, module, encoding="utf-8")


class RefusedName(pickle.UnpicklingError):
    """A name outside the allow-list; its message is the full name."""


class RestrictedUnpickler(pickle._Unpickler):  # the one in Python, whose instructions can be overridden
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
    """Refuse the two old formats in which torch's loaders do more than unpickle: tar files and TorchScript."""
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
    """The names for which `error` refused `f`; nothing is run to find them. Empty if it was not for a name."""
    if isinstance(error, RefusedName):
        return [str(error)]
    with contextlib.suppress(Exception), allowing(allowed):
        f.seek(start)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))
    # an older file format, or pickle instructions that torch.save never writes
    found = re.search(r"GLOBAL (\S+)|unrecognized function (\S+)|operand (\d+)", str(error))
    f.seek(start)
    if not found or f.read(1) not in (b"P", b"\x80"):  # neither a zip file nor a pickle
        return []
    return [found[1] or found[2] or f"pickle instruction {found[3]}"]


def latin1_bytes(text, encoding="latin1"):
    """How pickles of protocol 2 hold bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding}")
    return text.encode("latin1")


class NumericType:
    """Stands for a numpy dtype. The real one takes a state that makes numpy read and write beyond its memory."""

    def __init__(self, name, align=False, copy=False):
        if not re.fullmatch(r"[biufc]\d{1,2}", name):
            raise ValueError(f"numpy type {name!r} is not a number")
        self.dtype = np.dtype(name)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


def numeric_scalar(kind, data):
    return np.frombuffer(data, kind.dtype, count=1)[0]


class NumericArray(np.ndarray):
    """An array of numbers; saved again it is a plain one."""

    def __new__(cls, *unused):
        return super().__new__(cls, 0)

    def __setstate__(self, state):
        _, shape, kind, column_major, data = state
        super().__setstate__((1, shape, kind.dtype, bool(column_major), data))

    def __reduce__(self):
        return self.view(np.ndarray).__reduce__()


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression):
    """The value of an expression made of literals, brackets and + - * /, such as "[(512, 3)] * 4".

    What is no text is its own value: a checkpoint keeps some settings as they came out of this the first time.

    Raises:
        ValueError: the expression holds anything else
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
