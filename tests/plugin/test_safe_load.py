"""Checkpoints are loaded without running code that is hidden in them, by both loaders that `safe_load` has."""

import argparse
import collections
import functools
import importlib
import io
import os
import pickle
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import safe_load
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.logging import meters
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf

from tests.helpers.commands import run
from tests.helpers.hostile import Call, archive, member, write_dictionaries
from tests.helpers.paths import STOCK


@pytest.fixture(params=["weights_only", "restricted"])
def load(request, monkeypatch):
    if request.param == "weights_only" and not safe_load.NAMED_SAFE_GLOBALS:
        pytest.skip("needs torch 2.7 or newer")
    monkeypatch.setattr(safe_load, "NAMED_SAFE_GLOBALS", request.param == "weights_only")
    monkeypatch.delenv(safe_load.OPT_OUT, raising=False)
    return safe_load.load


def reload(load, content, **options):
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    buffer.seek(0)
    return load(buffer)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_planted_command_is_refused_and_not_run(load, tmp_path, zipped, protocol, monkeypatch):
    path = tmp_path / "planted.pt"
    state = {"args": argparse.Namespace(arch=Call(os.system, f"touch {tmp_path}/ran")), "model": {"w": torch.ones(2)}}
    torch.save(state, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    with pytest.raises(safe_load.CheckpointError) as refusal:
        load(str(path))
    message = str(refusal.value)
    assert message.startswith(f"{path}: rejected") and "FAIRSEQ_DEEP_UNSAFE_LOAD=1" in message and "\n" not in message
    assert protocol == 4 or "posix.system" in message or "nt.system" in message
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("FAIRSEQ_DEEP_UNSAFE_LOAD", "1")
    assert load(path)["args"].arch == 0 and (tmp_path / "ran").exists()


@pytest.mark.parametrize("call, name", [
    (Call(eval, "1 + 1"), "eval"), (Call(getattr, "text", "upper"), "getattr"), (Path("x"), "pathlib"),
    (Call(functools.partial, print), "functools.partial"), (Call(torch.load, "other.pt"), "torch.serialization.load"),
    (Call(importlib.import_module, "this"), "importlib.import_module"),
    (Call(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
    (Call(np.dtype, "f4,O"), ""),
    *((array, "") for array in (np.array(["text"]), np.array([None]), np.zeros(1, dtype=[("a", "f4")]))),
], ids=range(11))  # fmt: skip
def test_everything_off_the_list_is_refused_by_name(load, call, name):
    with pytest.raises(safe_load.CheckpointError, match=f"rejected.*{name}" if name else None):
        reload(load, {"x": call})


@pytest.mark.parametrize("content", [
    argparse.Namespace(arch="transformer", lr=[0.1], nested=argparse.Namespace(x=1)),
    OmegaConf.create({"model": {"a": [1, 2.5, "x", None, True], "b": "${model.a}"}}),
    OmegaConf.create({"model": argparse.Namespace(a=1)}, flags={"allow_objects": True}),
    TransformerConfig(), _TensorPlaceholder(3), collections.OrderedDict(a=1), {"bytes": b"a\xff", "set": {1}},
    {"size": torch.Size([1, 2]), "device": torch.device("cpu"), "type": torch.float16},
], ids=range(8))  # fmt: skip
@pytest.mark.parametrize("zipped", [True, False])
def test_contents_of_checkpoints_come_back_equal(load, content, zipped):
    loaded = reload(load, content, _use_new_zipfile_serialization=zipped)
    assert type(loaded) is type(content) and loaded == content


def test_tensors_and_numbers_come_back_equal(load):
    """Arrays also when they are saved again."""
    shared = torch.arange(6.0).reshape(2, 3)
    content = {"a": shared, "view": shared[:, 1:], "half": shared.half(), "p": torch.nn.Parameter(shared.clone())}
    loaded = reload(load, content)
    for name, tensor in content.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
    assert loaded["view"].data_ptr() == loaded["a"].data_ptr() + 4
    values = [np.float64(1.5), np.float32(2.5), np.int64(-3), np.bool_(True)]
    loaded = reload(load, values)
    assert loaded == values and [type(value) for value in loaded] == [type(value) for value in values]
    arrays = [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(2.0)]
    for array, again in zip(arrays, reload(load, reload(load, arrays))):
        assert np.array_equal(array, again) and array.dtype == again.dtype


def test_meters_come_back(load, monkeypatch):
    """Those of old fairseq, too."""
    average = meters.AverageMeter()
    average.update(3.0)
    for module in ("fairseq.logging.meters", "fairseq.meters"):
        monkeypatch.setattr(meters.AverageMeter, "__module__", module)
        loaded = reload(load, collections.OrderedDict(loss=average, ups=meters.TimeMeter()))
        assert loaded["loss"].avg == 3.0 and isinstance(loaded["ups"], meters.TimeMeter)


def test_a_damaged_file_or_another_kind_is_one_line(load, tmp_path):
    path = tmp_path / "damaged.pt"
    for content in (b"", b"no checkpoint\n", STOCK.read_bytes()[:40000]):
        path.write_bytes(content)
        with pytest.raises(safe_load.CheckpointError, match="damaged.pt: not a readable checkpoint.*corrupt") as error:
            load(path)
        assert "\n" not in str(error.value)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(path))
    with pytest.raises(safe_load.CheckpointError, match="TorchScript"):
        load(str(path))
    with pytest.raises(safe_load.CheckpointError, match="tar"):
        load(archive(tmp_path / "old.tar", member("x", "x"), mode="w:"))


def test_state_cannot_be_set_on_a_class():
    stream = b"\x80\x02cargparse\nNamespace\nN}X\x01\x00\x00\x00aK\x01s\x86b."
    unpickler = type("Restricted", (safe_load.RestrictedUnpickler,), {"allowed": safe_load.allowed_types()})
    with pytest.raises(pickle.UnpicklingError, match="a change of Namespace"):
        unpickler(io.BytesIO(stream)).load()
    assert not hasattr(argparse.Namespace, "a")


@pytest.mark.skipif(not safe_load.NAMED_SAFE_GLOBALS, reason="needs torch 2.7 or newer")
def test_safe_globals_of_the_user_stay():
    mine = [(argparse.Namespace, "argparse.Namespace")]
    with torch.serialization.safe_globals(mine):
        before = set(torch.serialization.get_safe_globals())
        safe_load.load(STOCK)
        assert set(torch.serialization.get_safe_globals()) == before


REFUSED = ["print()", "[x for x in ()]", "().__class__", "1 +", "~2", "2**9", "'a'*'b'"]


@pytest.mark.parametrize("expression", [
    "[(9, 10, 5)] + [(9, 3)] * 4", "(0.9, 0.98)", "True", "1e-4", "-2", "{'a': [1, None]}", " [1]\n", "1/4", "()",
    *REFUSED,
])  # fmt: skip
def test_expressions_of_numbers_are_evaluated_as_in_python_and_others_refused(expression):
    with pytest.raises(ValueError, match="not an expression of num") if expression in REFUSED else nullcontext():
        assert safe_load.evaluate(expression) == eval(expression.strip())


def test_booleans_of_a_checkpoint_need_not_be_text():
    """translation_multi_simple_epoch keeps left_pad_source as a bool; fairseq itself takes any for the default."""
    from fairseq.utils import eval_bool

    assert [eval_bool(value) for value in (True, False, "True", "False", None)] == [True, False, True, False, False]
    assert eval_bool(None, default=True) is True


def interactive(data, checkpoint):
    write_dictionaries(data, "en", "de")
    command = ["fairseq-interactive", data, "--path", checkpoint, "--cpu", "--beam", "2", "-s", "en", "-t", "de"]
    return run(*command, stdin="a b c\n", check=False)


def test_a_command_translates_with_the_checkpoint_of_stock_fairseq(tmp_path):
    done = interactive(tmp_path, STOCK)
    _, score, words = next(line for line in done.stdout.splitlines() if line.startswith("H-0")).split("\t")
    assert words == "g g" and float(score) == pytest.approx(-2.48105216, abs=1e-4)  # as stock fairseq itself gives


def test_a_command_runs_no_code_in_an_option_that_stock_fairseq_evaluates(tmp_path):
    state = torch.load(STOCK, weights_only=False)
    code = f"[__import__('os').system('touch {tmp_path}/ran')]"
    options = {"arch": "fconv", "_name": "fconv", "encoder_layers": code, "encoder_embed_path": None}
    vars(state["cfg"]["model"]).update(options)
    torch.save(state, tmp_path / "planted.pt")
    done = interactive(tmp_path, tmp_path / "planted.pt")
    assert done.returncode == 1 and not (tmp_path / "ran").exists() and "not an expression of numbers" in done.stderr
