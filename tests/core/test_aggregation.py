"""Layer aggregation (hierarchical, iterative, linear): nodes, precision.

The equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.hierarchical import Hierarchical
from fairseq_deep.core.aggregators.node import Node
from fairseq_deep.core.stack import Stack

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_sum_once(dtype):
    """Nine inputs: the norm reads their exact sum, rounded once to the dtype."""
    node = Node(Stack(9, C, ffn_dim=D), 9)
    torch.nn.init.zeros_(node.fc2.weight)
    node.to(dtype)
    inputs = [torch.randn(T, B, C).to(dtype) for _ in range(9)]
    exact = sum(u.double() for u in inputs).to(dtype)
    assert torch.equal(node(inputs), node.layer_norm(exact))
