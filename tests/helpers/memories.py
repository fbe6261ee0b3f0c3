"""Decoder memories: how to choose them, and comparisons of several outputs at once."""

import torch

TRANSPARENT, LAYERWISE = {"decoder_memory": "transparent"}, {"decoder_memory": "layerwise"}
MSC = {"decoder_memory": "msc", "layer_agg": "msc"}
ENCODER_MSC = {"decoder_memory": "msc", "encoder_layer_agg": "msc"}


def pairs(norms):
    return [(norm.weight, norm.bias) for norm in norms]


def parameters_of(cell):
    return cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh


def assert_gradients_equal(actual, expected, sources, tolerance=1e-6):
    """The tensors *actual* and *expected* are equal, and so are the gradients of *sources*, which all have one."""
    assert len(actual) == len(expected)
    near = {"rtol": tolerance, "atol": tolerance}
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want, **near)
    directions = [torch.randn_like(tensor) for tensor in actual]
    want = torch.autograd.grad(expected, sources, directions, retain_graph=True)
    for index, got in enumerate(torch.autograd.grad(actual, sources, directions, retain_graph=True)):
        torch.testing.assert_close(got, want[index], **near)
