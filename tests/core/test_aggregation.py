"""Layer aggregation (hierarchical, iterative, linear): the equations, counts, start values, whole models, refusals."""

import argparse
import functools
import itertools

import pytest
import torch

from fairseq_deep.core.aggregators import Aggregator
from fairseq_deep.core.aggregators.hierarchical import Hierarchical
from fairseq_deep.core.aggregators.iterative import Iterative
from fairseq_deep.core.aggregators.linear import Linear
from fairseq_deep.core.aggregators.node import Node
from fairseq_deep.core.attention.masks import future_mask
from fairseq_deep.core.layers import DecoderContext
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.models import full_size, make_batch, size_of
from tests.helpers.tensors import DOUBLE, assert_same_gradients, randomise
from tests.reference import naive_aggregation
from tests.reference.naive_dlcl import layer_norm

T, B, C, D = 5, 3, 6, 10
KINDS = {"hierarchical": Hierarchical, "iterative": Iterative, "linear": Linear}
# (method, options, depth): depths that blocks divide and do not divide, blocks of one layer and larger than the stack
CASES = [
    *(("hierarchical", {}, depth) for depth in (1, 2, 3, 4, 5, 6, 7)),
    *(("hierarchical", {"block": block}, depth) for block in (1, 3, 9) for depth in (1, 4, 6)),
    *((name, {}, depth) for name in ("iterative", "linear") for depth in (1, 2, 5)),
]
TINY = "transformer_{}_2l2l_tiny"
DEPTHS = {"encoder_layers": 3, "decoder_layers": 5}


def naive(aggregator, y_0, layers):
    """The output of the stack by the equations, with the weights of *aggregator*."""
    if isinstance(aggregator, Linear):
        size = y_0.size(-1)
        matrices = [aggregator.matrix[:, size * i : size * (i + 1)] for i in range(len(layers))]
        return naive_aggregation.linear(y_0, layers, matrices)
    nodes = [
        (n.fc1.weight, n.fc1.bias, n.fc2.weight, n.fc2.bias, n.layer_norm.weight, n.layer_norm.bias)
        for n in aggregator.nodes
    ]
    if isinstance(aggregator, Iterative):
        return naive_aggregation.iterative(y_0, layers, nodes)
    return naive_aggregation.hierarchical(y_0, layers, nodes, aggregator.block)


@pytest.mark.parametrize("name, options, depth", CASES)
def test_forward_and_gradients_equal_the_equations(name, options, depth):
    aggregator = randomise(KINDS[name](Stack(depth, C, ffn_dim=D), **options).double())
    layers = make_layers(depth, C)
    y_0 = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    actual, expected = run(aggregator, y_0, layers), naive(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected)
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    assert_same_gradients(actual, expected, sources, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
@pytest.mark.parametrize("name", KINDS)
def test_whole_models_equal_the_equations(name, norm, build, batch):
    """Depths of both kinds, the final norm of a pre-norm stack after it, and every gradient of the model."""
    model = build(TINY.format(norm), layer_agg=name, **DEPTHS).double().eval()
    for aggregator in (model.encoder.aggregator, model.decoder.aggregator):
        randomise(aggregator)
    source, lengths, target = batch
    padding = source.eq(model.encoder.padding_idx)

    def top(stack, y_0, layers):
        x = naive(stack.aggregator, y_0, layers)
        norm = stack.layer_norm
        return x if norm is None else layer_norm(x, norm.weight, norm.bias)

    x = model.encoder.embed(source)[0].masked_fill(padding.unsqueeze(-1), 0.0).transpose(0, 1)
    memory = top(model.encoder, x, [lambda x, layer=layer: layer(x, padding) for layer in model.encoder.layers])
    x = model.decoder.embed(target, model.decoder.embed_positions(target))
    mask, hidden = future_mask(len(x), len(x), x, -1e4), target.eq(model.decoder.padding_idx)
    context = DecoderContext(memory, padding, mask=mask, padding=hidden)
    x = top(
        model.decoder,
        x,
        [lambda x, layer=layer: layer(x, context)[0] for layer in model.decoder.layers],
    )
    words = target.ne(model.decoder.padding_idx)
    expected = model.decoder.output_layer(x.transpose(0, 1))[words]
    actual = model(source, lengths, target)[0][words]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (model.encoder.layer_norm is None) is (norm == "postnorm")
    parameters = list(model.parameters())
    assert_same_gradients(actual, expected, parameters, rtol=1e-4, atol=1e-4)


def test_a_node_of_one_input_is_a_post_norm_feed_forward_sublayer():
    node = randomise(Node(Stack(1, C, ffn_dim=D), 1).double())
    u = torch.randn(T, B, C, **DOUBLE)
    output = node.fc2(torch.relu(node.fc1(u))) + u
    torch.testing.assert_close(node([u]), layer_norm(output, node.layer_norm.weight, node.layer_norm.bias))


def test_a_stack_without_layers_passes_the_embeddings_on():
    x = torch.randn(T, B, C)
    for kind in KINDS.values():
        assert torch.equal(run(kind(Stack(0, C)), x, []), x)


def test_iterative_aggregation_of_one_layer_is_the_plain_stack():
    aggregator, x = Iterative(Stack(1, C)), torch.randn(T, B, C)
    assert not list(aggregator.parameters())
    assert torch.equal(run(aggregator, x, [torch.sin]), torch.sin(x))


# a node of n inputs: n d f + f + f d + d and its norm's 2 d
def node_size(dim, ffn, inputs):
    return inputs * dim * ffn + ffn + ffn * dim + dim + 2 * dim


ADDED = {
    ("hierarchical", "6l"): 23090176,
    ("hierarchical", "6l_big"): 92317696,
    ("iterative", "6l"): 31493120,
    ("iterative", "6l_big"): 125900800,
    ("linear", "6l"): 2 * 6 * 512**2,
    ("linear", "6l_big"): 2 * 6 * 1024**2,
}


@pytest.fixture(scope="module")
def size():
    """size(name, **flags): number of parameters with a shared vocabulary of 34,040."""
    return functools.cache(lambda name, **flags: size_of(full_size(name, 34040, share_all_embeddings=True, **flags)))


@pytest.mark.parametrize("norm", ["postnorm", "prenorm"])
@pytest.mark.parametrize("name, shape", ADDED)
def test_the_parameters_that_it_adds_are_the_papers(name, shape, norm, size):
    architecture = f"transformer_{norm}_{shape}"
    assert size(architecture, layer_agg=name) - size(architecture) == ADDED[name, shape]


def test_the_printed_counts():
    """The paper's systems less its baselines, in millions: 111.10 - 88.01 and 356.38 - 264.06."""
    assert round(88.01 + ADDED["hierarchical", "6l"] / 1e6, 2) == 111.10
    assert round(264.06 + ADDED["hierarchical", "6l_big"] / 1e6, 2) == 356.38


@pytest.mark.parametrize(
    "depth, options, inputs",
    [
        (6, {}, [2, 3, 3]),
        (7, {}, [2, 3, 3, 2]),
        (1, {}, [1]),
        (7, {"block": 3}, [3, 4, 2]),
        (3, {"block": 1}, [1, 2, 2]),
        (3, {"block": 8}, [3]),
    ],
)
def test_the_nodes_of_a_depth(depth, options, inputs):
    aggregator = Hierarchical(Stack(depth, C, ffn_dim=D), **options)
    assert [node.fc1.in_features for node in aggregator.nodes] == [C * count for count in inputs]
    count = sum(parameter.numel() for parameter in aggregator.parameters())
    assert count == sum(node_size(C, D, number) for number in inputs)


def test_the_width_of_a_node_is_that_of_feed_forward_sublayers():
    assert Node(Stack(6, C, ffn_dim=D), 2).fc1.out_features == D
    assert Node(Stack(6, C), 2).fc1.out_features == 4 * C


def test_start_values_of_nodes():
    for kind in (Hierarchical, Iterative):
        aggregator = kind(Stack(4, 32))
        matrices = [node_matrix for node in aggregator.nodes for node_matrix in (node.fc1.weight, node.fc2.weight)]
        assert [id(matrix) for matrix in aggregator.matrices()] == [id(matrix) for matrix in matrices]
        for matrix in matrices:
            bound = (6 / sum(matrix.shape)) ** 0.5
            assert 0.97 * bound < matrix.abs().max() <= bound
        for node in aggregator.nodes:
            assert not node.fc1.bias.any() and not node.fc2.bias.any() and not node.layer_norm.bias.any()
            assert node.layer_norm.weight.eq(1).all()


def test_lipschitz_fills_nodes_and_leaves_the_start_of_linear(build):
    model = build(TINY.format("postnorm"), encoder_layer_agg="hierarchical", decoder_layer_agg="linear",
                  deep_init="lipschitz", encoder_ffn_embed_dim=200)  # fmt: skip
    for matrix in model.encoder.aggregator.matrices():
        bound = matrix.size(1) ** -0.5
        assert 0.97 * bound < matrix.abs().max() <= bound
    matrix = model.decoder.aggregator.matrix
    assert torch.equal(matrix, torch.cat([torch.zeros(16, 16), torch.eye(16)], dim=1))


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
def test_linear_starts_as_the_plain_stack(norm, build, batch):
    plain, model = (build(TINY.format(norm), layer_agg=name, **DEPTHS).eval() for name in ("residual", "linear"))
    missing = model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    assert not missing.missing_keys and not missing.unexpected_keys
    assert torch.equal(model(*batch)[0], plain(*batch)[0])


@pytest.mark.parametrize("place", ["dropout", "activation_dropout"])
def test_dropout_is_on_the_network_of_a_node(place):
    node = randomise(Node(Stack(2, C, ffn_dim=64, **{place: 0.5}), 2))
    inputs = [torch.randn(T, B, C), torch.randn(T, B, C)]
    assert not torch.equal(node(inputs), node(inputs))
    assert torch.equal(node.eval()(inputs), node(inputs))
    with torch.no_grad():
        for parameter in node.fc2.parameters():
            parameter.zero_()
    torch.testing.assert_close(node.train()(inputs), node.eval()(inputs), msg="what is added passes it by")


def test_activation_dropout_is_before_the_second_product():
    """With a dead first matrix and probability 0.5, each hidden unit of value 1 contributes 0 or 2."""
    node = Node(Stack(2, 1, ffn_dim=1, activation_dropout=0.5), 1)
    with torch.no_grad():
        for parameter, value in zip(node.parameters(), (0.0, 1.0, 1.0, 0.0, 1.0, 0.0)):
            parameter.fill_(value)
    node.layer_norm = torch.nn.Identity()
    node.layer_norm.weight = node.fc1.weight
    assert set(node([torch.zeros(9, 9, 1)]).unique().tolist()) == {0.0, 2.0}


MODELS = list(itertools.product(KINDS, ("prenorm", "postnorm")))


@pytest.mark.parametrize("name, norm", MODELS)
def test_every_parameter_has_a_gradient(name, norm, build, batch):
    model = build(TINY.format(norm), layer_agg=name, dropout=0.1, **DEPTHS).train()
    model(*batch)[0].log_softmax(-1)[..., 5].sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any() or key.endswith("k_proj.bias"), key


@pytest.mark.parametrize("name, norm", MODELS)
def test_recomputation_agrees(name, norm, build, batch):
    model = build(TINY.format(norm), layer_agg=name, **DEPTHS)
    for aggregator in (model.encoder.aggregator, model.decoder.aggregator):
        randomise(aggregator)
    expected = model(*batch)[0]
    again = build(TINY.format(norm), layer_agg=name, checkpoint_activations=True, **DEPTHS)
    again.load_state_dict(model.state_dict())
    actual = again(*batch)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    expected.backward(direction)
    actual.backward(direction)
    for want, got in zip(model.parameters(), again.parameters()):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name, norm", MODELS)
def test_incremental_decoding_is_the_full_forward(name, norm, build, dictionary):
    model = build(TINY.format(norm), layer_agg=name, **DEPTHS).eval()
    randomise(model.decoder.aggregator)
    source, lengths, target = make_batch(dictionary, target_lengths=(6, 6, 6))
    with torch.no_grad():
        memory = model.encoder(source, lengths)
        expected = model.decoder(target, memory)[0]
        state = {}
        for step in range(target.size(1)):
            scores = model.decoder(target[:, : step + 1], memory, incremental_state=state)[0]
            torch.testing.assert_close(scores[:, -1], expected[:, step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, norm", MODELS)
def test_padding_changes_nothing(name, norm, build, dictionary):
    model = build(TINY.format(norm), layer_agg=name, **DEPTHS).eval()
    for aggregator in (model.encoder.aggregator, model.decoder.aggregator):
        randomise(aggregator)
    source, lengths, target = make_batch(dictionary, lengths=(5, 9, 3), target_lengths=(6, 6, 6))
    together = model(source, lengths, target)[0]
    for row, length in enumerate(lengths):
        alone = model(source[row : row + 1, -length:], lengths[row : row + 1], target[row : row + 1])[0]
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_sum_once(dtype):
    """Nine inputs: the norm reads their exact sum, rounded once to the dtype."""
    node = Node(Stack(9, C, ffn_dim=D), 9)
    torch.nn.init.zeros_(node.fc2.weight)
    node.to(dtype)
    inputs = [torch.randn(T, B, C).to(dtype) for _ in range(9)]
    exact = sum(u.double() for u in inputs).to(dtype)
    assert torch.equal(node(inputs), node.layer_norm(exact))


@pytest.mark.parametrize("kind", KINDS.values())
def test_autocast_gives_back_the_dtype_of_the_layers(kind):
    """Layers that return another dtype than the weights have, and the norms want."""
    aggregator = kind(Stack(3, C, ffn_dim=D))
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = run(aggregator, torch.randn(T, B, C), [lambda x, to=dtype: torch.sin(x).to(to)] * 3)
        assert x.dtype == dtype


@pytest.mark.parametrize("name, norm", MODELS)
def test_a_model_runs_in_bf16_and_under_autocast(name, norm, build, batch):
    model = build(TINY.format(norm), layer_agg=name, **DEPTHS)
    expected = model(*batch)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(*batch)[0]
    torch.testing.assert_close(scores.float(), expected, rtol=0.1, atol=0.1)
    scores.float().sum().backward()
    scores = model.bfloat16()(*batch)[0]
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("init", ["xavier", "lipschitz", "ds", "deepnet", "admin"])
def test_initialisations_go_with_it(init, build, batch):
    for name in KINDS:
        model = build(TINY.format("postnorm"), layer_agg=name, deep_init=init, **DEPTHS)
        assert model(*batch)[0].isfinite().all()


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
def test_memories_read_what_hierarchical_aggregation_hands_on(norm, build, batch):
    """Layer outputs as memories see them: the next layer's input; so each node has a gradient."""
    model = build(TINY.format(norm), layer_agg="hierarchical", decoder_memory="transparent", **DEPTHS).eval()
    inputs = []
    for layer in model.encoder.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    states = model.encoder(*batch[:2], return_all_hiddens=True)["encoder_states"]
    assert all(torch.equal(state, x) for state, x in zip(states, inputs)) and len(states) == len(inputs) + 1
    model(*batch)[0].log_softmax(-1)[..., 5].sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad.any() or key.endswith("k_proj.bias")), key


def test_the_flag_of_the_block_is_a_number(build):
    parser = argparse.ArgumentParser()
    Hierarchical.add_args(parser)
    assert parser.parse_args(["--hierarchical-block", "3"]).hierarchical_block == 3
    assert parser.parse_args([]).hierarchical_block is None
    model = build(TINY.format("postnorm"), layer_agg="hierarchical", hierarchical_block=3, **DEPTHS)
    assert [len(stack.aggregator.nodes) for stack in (model.encoder, model.decoder)] == [1, 2]


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"layer_agg": "hierarchical", "hierarchical_block": 0}, "--hierarchical-block 0 must be at least 1"),
        ({"layer_agg": "hierarchical", "hierarchical_block": -2}, "--hierarchical-block -2"),
        ({"layer_agg": "iterative", "hierarchical_block": 2}, "--hierarchical-block has no effect without"),
        *(({"layer_agg": name, "encoder_layerdrop": 0.1}, "omit --encoder-layerdrop") for name in KINDS),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY.format("postnorm"), **flags)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("memory", ["transparent", "layerwise"])
@pytest.mark.parametrize("name", KINDS)
def test_memories_read_what_tops_the_stack(name, memory, build, batch):
    """So every parameter has a gradient."""
    model = build(TINY.format("prenorm"), layer_agg=name, decoder_memory=memory).train()
    model(*batch)[0].square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_contract_gives_the_last_evaluation():
    """A method that evaluates a layer several times need not define `combine` or `next_input`."""
    aggregator, x = Aggregator(Stack(2, C)), torch.zeros(T, B, C)
    outputs = [x + 1, x + 2, x + 3]
    assert aggregator.start(x)[0] is x and aggregator.next_input(x, outputs) is x
    assert aggregator.combine(x, outputs) is outputs[2]
