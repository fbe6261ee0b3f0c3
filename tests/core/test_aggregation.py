"""Layer aggregation (hierarchical, iterative, linear): nodes, initial values, precision.

The equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.hierarchical import Hierarchical
from fairseq_deep.core.aggregators.iterative import Iterative
from fairseq_deep.core.aggregators.node import Node
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import is_uniform

T, B, C, D = 5, 3, 6, 10


@pytest.mark.parametrize(
    "depth, block, inputs",
    [(6, 2, [2, 3, 3]), (7, 2, [2, 3, 3, 2]), (1, 2, [1]), (7, 3, [3, 4, 2]), (3, 1, [1, 2, 2]), (3, 8, [3])],
)
def test_the_nodes_of_a_depth(depth, block, inputs):
    """As wide as the stack's feed-forward sub-layers: n d f + f + f d + d and a norm's 2 d for n inputs."""
    aggregator = Hierarchical(Stack(depth, C, ffn_dim=D), block)
    assert [node.fc1.in_features for node in aggregator.nodes] == [C * count for count in inputs]
    count = sum(parameter.numel() for parameter in aggregator.parameters())
    assert count == sum(number * C * D + D + D * C + C + 2 * C for number in inputs)
    assert Node(Stack(6, C), 2).fc1.out_features == 4 * C


def test_initial_values_of_nodes():
    for kind in (Hierarchical, Iterative):
        aggregator = kind(Stack(4, 32))
        matrices = [node_matrix for node in aggregator.nodes for node_matrix in (node.fc1.weight, node.fc2.weight)]
        assert [id(matrix) for matrix in aggregator.matrices()] == [id(matrix) for matrix in matrices]
        assert all(is_uniform(matrix, (6 / sum(matrix.shape)) ** 0.5) for matrix in matrices)
        for node in aggregator.nodes:
            assert not node.fc1.bias.any() and not node.fc2.bias.any() and not node.layer_norm.bias.any()
            assert node.layer_norm.weight.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_sum_once(dtype):
    """Nine inputs: the norm reads their exact sum, rounded once to the dtype."""
    node = Node(Stack(9, C, ffn_dim=D), 9)
    torch.nn.init.zeros_(node.fc2.weight)
    node.to(dtype)
    inputs = [torch.randn(T, B, C).to(dtype) for _ in range(9)]
    exact = sum(u.double() for u in inputs).to(dtype)
    assert torch.equal(node(inputs), node.layer_norm(exact))
