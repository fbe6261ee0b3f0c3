"""Gates and cell of the depth-wise LSTM: the fast forms against the plain ones, what they launch and what they keep."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core.aggregators import lstm_cell as module
from fairseq_deep.core.aggregators.lstm import DepthwiseLstm
from fairseq_deep.core.aggregators.lstm_cell import lstm_cell
from tests.helpers.lstm import make
from tests.helpers.tensors import Kernels, saved_bytes
from tests.reference.naive_dlcl import layer_norm

T, B, C = 4, 3, 5


def plain_cell(z, h, cell):
    """Eq. (2) to (4), (7) and (8) after the norms, as they are written."""
    i, f, o = torch.sigmoid(z).unbind(2)
    cell = cell * f + h * i
    return cell * o, cell


def plain_norm(x, weight, bias):
    x = x.view(T, B, 3, C)
    return torch.stack([layer_norm(x[:, :, gate], weight[gate], bias[gate]) for gate in range(3)], dim=2)


def cell_inputs(dtype=torch.float64, scale=1.0):
    shapes = (T, B, 3, C), (T, B, C), (T, B, C)
    return [(scale * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_() for shape in shapes]


def norm_inputs(dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((T, B, 3 * C), (3, C), (3, C))]


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["", "saturated"])
@pytest.mark.parametrize("used", ["out", "cell", "both"])
def test_the_cell_and_its_gradients_equal_the_formula(used, scale):
    inputs = cell_inputs(scale=scale)
    results = []
    for form in (plain_cell, lstm_cell):
        out, cell = form(*inputs)
        loss = {"out": out.sin().sum(), "cell": cell.cos().sum(), "both": (out.sin() * cell).sum()}[used]
        results.append([out, cell, *torch.autograd.grad(loss, inputs)])
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_gradcheck_of_the_cell():
    assert torch.autograd.gradcheck(lstm_cell, cell_inputs())


def test_the_cell_takes_strided_tensors_and_one_tensor_twice():
    """As in the first step, where Out and Cell are one tensor, and as views of a larger one."""
    z = torch.randn(T, C, 3, B, dtype=torch.float64, requires_grad=True)
    x = torch.randn(T, B, 2 * C, dtype=torch.float64, requires_grad=True)
    expected, actual = (
        torch.autograd.grad(form(z.transpose(1, 3), x[..., ::2], x[..., ::2])[0].sin().sum(), (z, x))
        for form in (plain_cell, lstm_cell)
    )
    for want, got in zip(expected, actual):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["norm_gates", "_norm_groups"])
def test_both_norms_and_their_gradients_equal_the_equation(name):
    inputs = norm_inputs()
    direction = torch.randn(T, B, 3, C, dtype=torch.float64)
    results = []
    for form in (plain_norm, getattr(module, name)):
        y = form(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, direction)])
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def old_step(x, weight, bias, h, cell):
    """One rounding after each operation."""
    z = torch.addcmul(bias, F.layer_norm(x.view(*x.shape[:2], 3, -1), (weight.size(1),)), weight)
    i, f, o = torch.sigmoid(z).unbind(2)
    cell = cell * f + h * i
    return cell * o, cell


def new_step(x, weight, bias, h, cell):
    return lstm_cell(module._norm_groups(x, weight, bias), h, cell)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_the_formula_step_by_step(dtype):
    """Outputs and gradients of what a GPU runs, against fp64 with the same rounded inputs."""
    width = 512
    shapes = (16, 8, 3 * width), (3, width), (3, width), (16, 8, width), (16, 8, width)
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    inputs[1] = 1 + inputs[1] / 10
    directions = [torch.randn(shapes[-1], dtype=torch.float64).to(dtype) for _ in range(2)]

    def run(form, dtype):
        sources = [value.to(dtype).requires_grad_() for value in inputs]
        outputs = form(*sources)
        grads = torch.autograd.grad(outputs, sources, [direction.to(dtype) for direction in directions])
        return [value.detach().double() for value in (*outputs, *grads)]

    def old(x, weight, bias, h, cell):
        x = F.layer_norm(x.view(16, 8, 3, width), (width,))
        return plain_cell(torch.addcmul(bias, x, weight), h, cell)

    def new(x, weight, bias, h, cell):
        return lstm_cell(module._norm_groups(x, weight, bias), h, cell)

    for exact, before, now in zip(run(old, torch.float64), run(old, dtype), run(new, dtype)):
        assert (now - exact).norm() < 1.02 * (before - exact).norm()


def test_what_a_step_launches():
    """On a device that is no CPU. Without gradients there is nothing more than in the forward pass of training."""
    aggregator = make(DepthwiseLstm, 1, 8).to("meta")
    out, cell, attention = torch.randn(3, T, B, 8, device="meta", requires_grad=True)
    forward = ["cat", "mm", "native_layer_norm", "glu", "mm"]
    forward += ["mm", "native_group_norm", "sigmoid", "mul", "addcmul_", "mul"]
    with Kernels() as launches:
        new_out, new_cell = aggregator.write([out, cell], 0, attention)
    assert launches.names == forward
    with torch.no_grad(), Kernels() as launches:
        aggregator.write([out, cell], 0, attention)
    assert launches.names == forward
    with Kernels() as launches:
        torch.autograd.grad([new_out, new_cell], list(aggregator.parameters()), [new_out, new_cell])
    gates = ["addcmul", "mul", "mul", "mul", "sigmoid_backward", "mul", "native_group_norm_backward", "mm"]
    hidden = ["mm", "mm", "glu_backward", "native_layer_norm_backward", "mm"]
    assert sorted(launches.names) == sorted(gates + hidden)


def test_what_a_step_keeps():
    """The cell three gates, h and two cells; the norm of the gates its input; the rest c (2C), 4C, 4C and 2C."""
    inputs = [x.float().detach().requires_grad_() for x in cell_inputs()]
    size = inputs[1].numel() * 4
    assert saved_bytes(lambda: lstm_cell(*inputs), []) == 6 * size
    statistics = 2 * 3 * T * B * 4
    x, weight, bias = norm_inputs(torch.float32)
    assert saved_bytes(lambda: module._norm_groups(x, weight, bias), [weight, bias]) == 3 * size + statistics


def test_a_compiler_sees_the_formula_in_one_graph():
    """On the device whose eager form differs; gradients are its own, too."""
    aggregator, graphs = make(DepthwiseLstm, 2, C).to("meta"), []
    state = [torch.randn(T, B, C, device="meta", requires_grad=True) for _ in range(2)]

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compile(aggregator.write, backend=backend, fullgraph=True)(state, 1, state[0] * 2)
    (graph,) = graphs
    assert "sigmoid" in graph and "layer_norm" in graph
    assert "autograd_function" not in graph and "group_norm" not in graph
