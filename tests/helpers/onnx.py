"""The code of docs/tools/export-onnx.md, and its programs in onnxruntime."""

import importlib.util

import torch

from tests.helpers.docs import code_of

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def missing(*packages):
    return [package for package in packages if importlib.util.find_spec(package) is None]


def documented():
    """The Python code of the page: it converts ``model.pt2`` of the working directory."""
    return code_of("docs/tools/export-onnx.md")


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
