"""Hyper-Connections and mHC: initial weights, doubly stochastic matrices, compiled functions.

Their equations, and that they start as the plain stack, are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.hyper_connections import KINDS, sinkhorn
from fairseq_deep.plugin.models.compiling import compile_calls, graphs
from tests.helpers.aggregators import make as make_aggregator
from tests.helpers.aggregators import read_path, run
from tests.helpers.tensors import shake

T, B, C = 5, 3, 7
UNNORMED = {"final_norm": False}


def make(kind, streams, layers=2):
    return make_aggregator("hyper-connections", layers, C, streams=streams, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_sublayer_prefers_a_stream(kind):
    assert [mixer.reads[0].argmax().item() for mixer in make(kind, 3).mixers] == [0, 1, 2, 0]


@pytest.mark.parametrize("kind, factor", [("dynamic", 3.0), ("static", 3.0), ("manifold", 1.0)])
def test_without_a_final_norm_the_output_is_the_papers(kind, factor):
    """Also that of checkpoints of version 0.3: the sum of the streams, or in mHC their mean."""
    aggregators = [make(kind, 3), make_aggregator("hyper-connections", 2, C, streams=3, kind=kind, stack=UNNORMED)]
    y_0, layers = torch.randn(T, B, C), [torch.tanh] * 4
    mean, output = (run(aggregator, y_0, layers) for aggregator in aggregators)
    torch.testing.assert_close(output, factor * mean)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_matrices_of_mhc_are_doubly_stochastic(scale):
    """Also from logits whose exponentials overflow; convergence is slow where one entry rules."""
    found = sinkhorn(scale * torch.randn(50, 4, 4))
    assert found.isfinite().all() and (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(50, 4))
    if scale == 1:
        torch.testing.assert_close(found.sum(-2), torch.ones(50, 4), atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "manifold"])
def test_compiled_weights_are_few_functions_for_all_sublayers(kind):
    torch._dynamo.reset()
    aggregator = shake(make(kind, 2, layers=3)).train()
    sublayers = [torch.nn.Linear(C, C) for _ in range(aggregator.num_layers)]
    y_0, before = torch.randn(T, B, C), graphs()
    expected = torch.stack(read_path(aggregator, y_0, sublayers))
    compiler = compile_calls(aggregator.compiled(), "eager")
    torch.testing.assert_close(torch.stack(read_path(aggregator, y_0, sublayers)), expected)
    assert None not in compiler.functions.values() and graphs() - before <= 3 < aggregator.num_layers
