"""Whole models of the initialisations: equations of their connections, parameters, presets, checkpoints."""

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.core.inits import INITS
from fairseq_deep.plugin.architectures import ARCHITECTURES, build_architecture, count_parameters
from tests.helpers.equations import affine, functions, start
from tests.helpers.flags import parse
from tests.helpers.inits import DEPTH, M, N, train_step, with_connections
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import PRENORM as PRE
from tests.helpers.models import size_of
from tests.helpers.tensors import shake
from tests.reference import naive_connections as naive
from tests.reference.naive_dlcl import layer_norm, run_stack

KINDS = {"deepnet": "deepnet", "admin": "admin", "rezero": "rezero"}


def layer_function(layer, side, method, pre_norm, *seen):
    """A whole layer as a function of its input."""
    sublayers = []
    for index, (function, norm) in enumerate(functions(layer, *seen)):
        factor = None
        if method == "deepnet":
            factor = naive.deepnet_alpha(side, N, M)
        elif method in ("admin", "rezero"):
            factor = layer.residual.weight[index if method == "admin" else 0]
        sublayers.append((function, naive.connect(KINDS.get(method, "plain"), factor), norm))
    return lambda x: naive.run_sublayers(x, sublayers, pre_norm)


def naive_scores(model, source, target, method, pre_norm):
    """Scores (B x T x V) of a model of the narrow architectures, from the equations alone."""
    pad = model.encoder.padding_idx

    def seen(b, i, j):
        return source[b, j] != pad

    def earlier(b, i, j):
        return j <= i and target[b, j] != pad

    memory = None
    for side, tokens in (("encoder", source), ("decoder", target)):
        stack = getattr(model, side)
        x = start(stack, tokens)
        if side == "encoder":
            x = x.masked_fill(source.eq(pad).T.unsqueeze(-1), 0.0)
        layers = [layer_function(layer, side, method, pre_norm, memory, seen, earlier) for layer in stack.layers]
        if hasattr(stack.aggregator, "weight"):
            norms = [affine(norm) for norm in stack.aggregator.layer_norms]
            weight = stack.aggregator.weight.view(*stack.aggregator.weight.shape[:2], -1)
            x = run_stack(x, layers, weight, norms, pre_norm)
        else:
            for layer in layers:
                x = layer(x)
        norm = affine(stack.layer_norm)
        memory = x = x if norm is None else layer_norm(x, *norm)
    return x.transpose(0, 1) @ model.decoder.output_projection.weight.T


@pytest.mark.parametrize(
    "method, name, flags",
    [
        ("lipschitz", POST, {"layernorm_embedding": True}),
        ("lipschitz", PRE, {}),
        ("ds", POST, {}),
        ("deepnet", POST, {}),
        ("deepnet", "transformer_dlcl_postnorm_2l2l_tiny", {}),
        ("admin", POST, {}),
        ("admin", "transformer_dlcl_postnorm_2l2l_tiny", {}),
        ("tfixup", POST, {}),
        ("rezero", POST, {}),
    ],
)
def test_scores_and_gradients_equal_the_equations(method, name, flags, build, batch):
    depth = {f"{side}_layers": layers for side, layers in DEPTH.items()}
    model = build(name, deep_init=method, **depth, **flags).double()
    shake(model, 0.5 if affine(model.encoder.layers[0].final_layer_norm) else 0.12)
    source, lengths, target = batch
    words = target.ne(model.decoder.padding_idx)
    expected = naive_scores(model, source, target, method, model.decoder.layers[0].normalize_before)[words]
    actual = model(source, lengths, target)[0][words]
    # the weights of the last attention, which fairseq asks for, are of fp32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(actual)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected, parameters, direction)
    for (key, _), want, got in zip(
        model.named_parameters(), wanted, torch.autograd.grad(actual, parameters, direction)
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    "method, difference",
    [
        *((method, 0) for method in ("fairseq", "xavier", "lipschitz", "ds", "depth-scaled", "deepnet")),
        ("admin", 16 * (2 * N + 3 * M)),
        ("rezero", N + M - 2 * 16 * (2 * N + 3 * M)),
        ("tfixup", -2 * 16 * (2 * N + 3 * M)),
    ],
)
def test_parameters_that_a_method_adds_and_removes(method, difference, build):
    plain = build(POST, encoder_layers=N, decoder_layers=M)
    model = with_connections(build, method)
    assert size_of(model) - size_of(plain) == difference
    if difference == 0:
        assert model.state_dict().keys() == plain.state_dict().keys()
    kept = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(kept) == (0 if method in ("rezero", "tfixup") else 2 * N + 3 * M)
    weights = {name: tuple(value.shape) for name, value in model.named_parameters() if "residual" in name}
    shapes = {"admin": {"encoder": (2, 16), "decoder": (3, 16)}, "rezero": {"encoder": (1,), "decoder": (1,)}}
    layers = [(side, layer) for side, depth in DEPTH.items() for layer in range(depth)]
    if method not in shapes:
        layers = []
    assert weights == {f"{side}.layers.{layer}.residual.weight": shapes[method][side] for side, layer in layers}


def test_rezero_starts_as_the_identity(build, batch):
    """Over the whole depth: what comes out is the embedding, and only the gates and the tables move at first."""
    model = build("transformer_postnorm_6l", encoder_layers=30, decoder_layers=30, deep_init="rezero").train()
    source, lengths, target = batch
    encoder_out = model.encoder(source, lengths, return_all_hiddens=True)
    embedded = start(model.encoder, source).masked_fill(source.eq(model.encoder.padding_idx).T.unsqueeze(-1), 0.0)
    torch.testing.assert_close(encoder_out["encoder_out"][0], embedded)
    assert len(encoder_out["encoder_states"]) == 31
    output, extra = model.decoder(target, encoder_out=encoder_out)
    assert all(torch.equal(state, extra["inner_states"][0]) for state in extra["inner_states"])
    output.square().mean().backward()
    for name, parameter in model.named_parameters():
        moves = "residual" in name and "decoder" in name or "embed" in name or "output" in name
        assert bool(parameter.grad.any()) is (moves and "encoder.embed" not in name), name


@pytest.mark.parametrize("method", [name for name in INITS.names() if name != "fairseq"])
def test_a_loaded_model_is_not_initialised_again(method, build, batch, tmp_path):
    model = with_connections(build, method)
    shake(model, 0.3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = with_connections(build, method)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    for model_ in (model, other):
        train_step(model_, batch)
    for (key, value), loaded in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(loaded, value), key
    assert torch.equal(other.eval()(*batch)[0], model.eval()(*batch)[0])


@pytest.mark.parametrize("method", ["deepnet", "admin", "tfixup", "rezero"])
def test_what_has_connections_of_its_own_learns(method, build, batch):
    model = with_connections(build, method).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        scores, words = model(*batch)[0][:, :-1].flatten(0, 1), batch[2][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(scores, words, ignore_index=model.decoder.padding_idx)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# exact counts at the papers' vocabularies: rows xu_base_* and zhang_dsinit_* of the project's table of counts; a pair
# of an encoder and a decoder layer has 7,356,416 parameters, which gives the depths that it lacks
PAIR = 7356416
PARAMETERS = {
    **{
        f"transformer_lipschitz{order}_{depth}": parameters
        for order in ("", "_postnorm")
        for depth, parameters in {
            "6l": 62382080,
            "12l12l": 106520576,
            "18l18l": 150659072,
            "24l24l": 194797568,
            "24l": 119124992,
            "6l24l": 138054656,
        }.items()
    },
    "transformer_ds_6l": 72309760,
    "transformer_ds_12l12l": 116448256,
    "transformer_ds_18l18l": 116448256 + 6 * PAIR,
    "transformer_ds_20l20l": 175299584,
    "transformer_ds_30l30l": 175299584 + 10 * PAIR,
    "transformer_deepnet_18l18l": 61566976 + 12 * PAIR,
    "transformer_admin_18l18l": 61566976 + 12 * PAIR + 18 * 5 * 512,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_count_is_the_papers(name):
    assert count_parameters(name) == PARAMETERS[name]


DROPOUTS = {"lipschitz": (0.1, 0.1, 0.1), "deepnet": (0.1, 0.1, 0.1), "admin": (0.1, 0.1, 0.1)}
INITIALISED = [
    name
    for name, row in ARCHITECTURES.items()
    if row.chosen["deep_init"] not in ("fairseq", "xavier") and row.chosen["residual"] == "plain"
]


def test_the_papers_systems_are_there():
    """Rows of both computation orders at each depth of X20, the depths of Z19, and what grew out of them."""
    assert set(PARAMETERS) <= set(INITIALISED)
    for init in ("deepnet", "admin"):
        assert {f"transformer_{init}_{depth}" for depth in ("18l18l", "24l24l", "30l30l")} <= set(INITIALISED)


@pytest.mark.parametrize("name", INITIALISED)
def test_presets_are_the_published_ones(name):
    method = name.split("_")[1]
    args = parse("--arch", name)
    pre_norm = method == "lipschitz" and "_postnorm" not in name
    assert args.deep_init == method
    assert args.layer_agg == "residual"
    assert (bool(args.encoder_normalize_before), bool(args.decoder_normalize_before)) == (pre_norm, pre_norm)
    assert bool(args.layernorm_embedding) is (method == "lipschitz" and not pre_norm)
    dropouts = (0.1, 0.1, 0.1) if name.endswith("_6l") else DROPOUTS.get(method, (0.3, 0.2, 0.1))
    if "_matt_" in name:
        assert args.decoder_attn == "merged"
        dropouts = {"big": (0.3, 0.1, 0.1), "iwslt": (0.5, 0.3, 0.1)}.get(name.split("_")[-1], dropouts)
    assert (args.dropout, args.attention_dropout, args.activation_dropout) == dropouts


@pytest.mark.parametrize("name", INITIALISED)
def test_a_flag_beats_the_preset(name):
    assert parse("--arch", name, "--deep-init", "xavier").deep_init == "xavier"


@pytest.mark.parametrize("name", ["transformer_lipschitz_postnorm_6l", "transformer_ds_12l12l"])
def test_another_aggregator_leaves_the_other_presets(name):
    """Only options of the row's aggregator go with it."""
    args, plain = parse("--arch", name, "--layer-agg", "dlcl"), parse("--arch", name)
    assert args.layer_agg == "dlcl"
    for flag in ("deep_init", "layernorm_embedding", "dropout", "attention_dropout", "activation_dropout"):
        assert getattr(args, flag, None) == getattr(plain, flag), flag


def test_lipschitz_v1_has_a_norm_on_the_embedding_and_none_on_top(build):
    model = build("transformer_lipschitz_postnorm_6l")
    for stack, layers in ((model.encoder, 2), (model.decoder, 3)):
        assert isinstance(stack.layernorm_embedding, torch.nn.LayerNorm)
        assert stack.layer_norm is None
        norms = [module for module in stack.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert len(norms) == layers * 6 + 1
    model = build("transformer_lipschitz_6l")
    for stack in (model.encoder, model.decoder):
        assert stack.layernorm_embedding is None
        assert isinstance(stack.layer_norm, torch.nn.LayerNorm)


def test_a_model_without_memory_is_initialised_too():
    """As for counting parameters: on the device "meta", where every tensor has one address."""
    words = Dictionary()
    with skip_initialisation():
        for method in ("lipschitz", "tfixup", "admin"):
            assert size_of(build_architecture(POST, words, deep_init=method)) > 0


@pytest.mark.parametrize("sides", [("encoder",), ("decoder",), ("encoder", "decoder")], ids="+".join)
@pytest.mark.parametrize("method", ["xavier", "lipschitz", "ds"])
def test_pretrained_embeddings_stay(build, dictionary, tmp_path, method, sides):
    path = tmp_path / "vectors.txt"
    lines = [f"{word} " + " ".join(["7.0"] * 32) for word in dictionary.symbols]
    path.write_text(f"{len(lines)} 32\n" + "\n".join(lines) + "\n")
    flags = {f"{side}_embed_dim": 32 for side in DEPTH}
    model = build(POST, deep_init=method, **flags, **{f"{side}_embed_path": str(path) for side in sides})
    for side in DEPTH:
        table = getattr(model, side).embed_tokens.weight
        assert bool((table[dictionary.nspecial :] == 7.0).all()) == (side in sides)
        assert float(getattr(model, side).layers[0].fc1.bias.abs().max()) == 0.0


def test_learned_positions_have_the_rule_of_embeddings(build):
    model = build(POST, deep_init="lipschitz", encoder_learned_pos=True, max_source_positions=500)
    table = model.encoder.embed_positions
    bound = (2 / sum(table.weight.shape)) ** 0.5
    assert 0.9 * bound < float(table.weight.abs().max()) <= bound
    assert float(table.weight[table.padding_idx].abs().max()) == 0.0


@pytest.mark.parametrize("name", INITS.names())
def test_a_feed_forward_sublayer_of_width_0_can_be_initialised(name, build, batch):
    """As with fairseq's own initialisation, which leaves nothing to fill."""
    flags = {"encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}
    model = build("transformer_postnorm_2l2l_tiny", deep_init=name, **flags)
    assert model(*batch)[0].isfinite().all()
