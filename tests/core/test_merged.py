"""Decoders with every --decoder-attn: equations, initial values, counts, dropout, states of decoding, alignments."""

import argparse
import math

import pytest
import torch

from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.diagnostics import sublayer_ratios
from fairseq_deep.core.layers import DecoderContext
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES, build_architecture, count_parameters
from tests.helpers.decoder_attention import KINDS, LUNA, NEAR, STACKS, assert_same_gradients, make_model
from tests.helpers.equations import affine, projections, start
from tests.helpers.flags import parse
from tests.helpers.inits import DIM, FFN, MATRIX, VOCAB, check_sample, expected
from tests.helpers.invariances import NEAR as NEAR_FP32
from tests.helpers.lstm import named_steps
from tests.helpers.models import POSTNORM, full_size, make_batch, make_dictionary, size_of
from tests.helpers.tensors import shake, tensors_on_modules
from tests.reference import naive_average, naive_connections, naive_ssru
from tests.reference.naive_dlcl import layer_norm, run_stack
from tests.reference.naive_lstm import attention, run_decoder, run_encoder

PAD = 1
POST = "transformer_postnorm_6l"
MERGED = ["merged", "merged-self", "merged-average"]
OTHERS = [kind for kind in KINDS if kind != "self"]


def fits(kind, stack):
    if stack == "another width":
        return kind not in ("self", "merged")  # one matrix for the values of both sides
    if "ffn" in kind and stack in ("lstm", "rnn"):
        return False  # whose layers have no feed-forward width
    # SSRU stands where average attention does: a stack of each kind of layers
    return kind != "ssru" or stack in ("postnorm", "dlcl-pre", "lstm")


COMBINATIONS = [(kind, stack) for kind in KINDS for stack in STACKS if fits(kind, stack)]
SHALLOW = [(kind, stack) for kind, stack in COMBINATIONS if stack in ("postnorm", "lstm")]


def is_parallel(kind):
    return kind.startswith("merged")


def attention_functions(layer, kind, memory, seen, earlier, mask):
    """F of the attentions of a decoder *layer*: two, or one where they are merged."""
    cross, own = layer.encoder_attn, layer.self_attn
    of_memory = (projections(cross), cross.num_heads, seen)
    if kind == "merged":
        return [lambda x: naive_average.merged(x, memory, *of_memory, mask)]
    if "average" in kind:
        linears = [own.fc1, own.fc2] if "ffn" in kind else []
        ffn = [part for linear in linears for part in (linear.weight, linear.bias)]
        gate = (own.gate.weight, own.gate.bias)
        average = lambda x: naive_average.average_attention(x, mask, gate, ffn or None)  # noqa: E731
        if is_parallel(kind):
            return [lambda x: naive_average.merged_average(x, memory, average, *of_memory)]
    elif kind == "ssru":
        words = mask.diagonal(dim1=1, dim2=2) > 0
        gate = (own.gate.weight, own.gate.bias)
        average = lambda x: naive_ssru.ssru(x, words, gate, own.input_proj.weight)  # noqa: E731
    elif is_parallel(kind):
        return [lambda x: naive_average.merged_self(x, memory, projections(own), *of_memory, earlier)]
    else:
        average = lambda x: attention(x, x, projections(own), own.num_heads, earlier)[0]  # noqa: E731
    return [average, lambda x: attention(x, memory, *of_memory)[0]]


def norms_of(layer, kind):
    names = ["encoder_attn"] if is_parallel(kind) else ["self_attn", "encoder_attn"]
    return [affine(getattr(layer, f"{name}_layer_norm")) for name in names]


def naive_layer(layer, kind, context, method="plain"):
    """A whole layer of residual connections as a function of its input."""
    linears = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
    functions = [*attention_functions(layer, kind, *context), naive_connections.feed_forward_function(*linears)]
    weight = getattr(layer.residual, "weight", None)  # of Admin for each sub-layer, of ReZero for all
    factors = [weight[index] if method == "admin" else weight for index in range(len(functions))]
    connections = [naive_connections.connect(method, factor) for factor in factors]
    sublayers = list(zip(functions, connections, [*norms_of(layer, kind), affine(layer.final_layer_norm)]))
    return lambda x: naive_connections.run_sublayers(x, sublayers, layer.normalize_before)


def naive_depthwise(aggregator, layers, x, kind, context, merge="add", attn_residual=True):
    """Output of a stack of layers that are their attention alone, of normalised queries."""
    places, final = 2 if merge == "two" else 1, aggregator.final_norm and affine(aggregator.final_norm)
    steps = named_steps(aggregator, "gate" if len(aggregator.gates) else "none", places)
    stack = []
    for first, last in zip(layers[::places], layers[places - 1 :: places]):
        whole = argparse.Namespace(self_attn=first.self_attn, encoder_attn=last.encoder_attn)
        whole.self_attn_layer_norm = getattr(first, "self_attn_layer_norm", None)
        whole.encoder_attn_layer_norm = last.encoder_attn_layer_norm
        pairs = zip(attention_functions(whole, kind, *context), norms_of(whole, kind))
        stack.append([lambda x, f=f, norm=norm: f(layer_norm(x, *norm)) for f, norm in pairs])
    if is_parallel(kind):
        return run_encoder(x, [attend for (attend,) in stack], steps, final_norm=final)
    return run_decoder(x, stack, steps, merge, attn_residual=attn_residual, final_norm=final)


def naive_scores(model, kind, stack, source, lengths, target, causal=True, method="plain", **options):
    """Scores (B x T x V) of the model's decoder from the equations alone, on what its encoder makes of the source."""
    decoder, words = model.decoder, target.ne(PAD)

    def seen(b, i, j):
        return source[b, j] != PAD

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; nobody sees that
        return (j <= i or not causal) and (bool(words[b, j]) or j == i)

    memory = model.encoder(source, lengths)["encoder_out"][0]
    context = (memory, seen, earlier, naive_average.average_mask(words, causal))
    x, layers = start(decoder, target), list(decoder.layers)
    if stack in ("lstm", "rnn"):
        x = naive_depthwise(decoder.aggregator, layers, x, kind, context, **options)
    else:
        functions = [naive_layer(layer, kind, context, method) for layer in layers]
        if stack.startswith("dlcl"):
            norms = [affine(norm) for norm in decoder.aggregator.layer_norms]
            pre_norm = layers[0].normalize_before
            x = run_stack(x, functions, decoder.aggregator.weight.unsqueeze(-1), norms, pre_norm)
        else:
            for function in functions:
                x = function(x)
    x = x if decoder.layer_norm is None else layer_norm(x, *affine(decoder.layer_norm))
    return x.transpose(0, 1) @ decoder.output_projection.weight.T


def padded_batch(dictionary):
    """With padding on the left of sources, and on the left, on the right and in the middle of targets."""
    source, lengths, target = make_batch(dictionary, target_lengths=(4, 6, 6))
    target[1] = target[1].roll(2)
    target[1, :2], target[2, 3] = PAD, PAD
    return source, lengths, target


def assert_equations(model, kind, stack, batch, causal=True, **options):
    source, lengths, target = batch
    words = target.ne(PAD)
    wanted = naive_scores(model, kind, stack, *batch, causal, **options)[words]
    encoder_out = model.encoder(source, lengths)
    actual = model.decoder(target, encoder_out=encoder_out, full_context_alignment=not causal)[0][words]
    torch.testing.assert_close(actual, wanted, **NEAR)
    assert_same_gradients(model, wanted, actual)


def test_every_attention_is_tested():
    kinds = {flags.get("decoder_attn", "self") for flags in (*KINDS.values(), LUNA)}
    assert kinds == set(DECODER_ATTENTIONS.names())


@pytest.mark.parametrize("kind, stack", COMBINATIONS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full context"])
def test_scores_and_gradients_equal_the_equations(kind, stack, causal, build, dictionary):
    if kind == "ssru" and not causal:
        pytest.skip("a recurrence sees no later positions")
    assert_equations(make_model(build, kind, stack), kind, stack, padded_batch(dictionary), causal)


@pytest.mark.parametrize("options", [{"merge": "concat"}, {"merge": "two"}, {"attn_residual": False}], ids=str)
def test_average_attention_in_every_layer_of_a_depthwise_lstm(options, build, batch):
    model = make_model(build, "average", "lstm", **{f"lstm_{key}": value for key, value in options.items()})
    assert_equations(model, "average", "lstm", batch, **options)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("method", ["admin", "rezero"])
def test_connections_of_their_own_equal_the_equations(kind, method, build, batch):
    model = make_model(build, kind, "postnorm", deep_init=method)
    shake(model, 0.5 if method == "admin" else 0.2)
    assert_equations(model, kind, "postnorm", batch, method=method)


N, M = 4, 5


@pytest.fixture(scope="module")
def wide():
    """wide(kind, method, **flags): a post-norm model, wide enough for the statistics of its matrices."""
    words = make_dictionary(VOCAB)
    sizes = {"encoder_embed_dim": DIM, "encoder_ffn_embed_dim": FFN, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_layers": N, "decoder_layers": M}  # fmt: skip

    def build(kind, method, **flags):
        return build_architecture(POST, words, **{**sizes, **KINDS[kind], "deep_init": method, **flags})

    return build


CASES = [("xavier", {}), ("lipschitz", {}), ("ds", {}), ("ds", {"ds_init_exponent": 0.5}), ("depth-scaled", {}),
         ("depth-scaled", {"depth_scaled_kind": "gpt2"}), ("admin", {}), ("rezero", {})]  # fmt: skip
OF_THREE = [(kind, "deepnet", {}) for kind in ("average-ffn", "ssru")]
# other matrices of attentions are like one of these, in no fused matrix
LIKE = {"gate": "q_proj", "input_proj": "v_proj", "fc1": "fc1", "fc2": "fc2"}


@pytest.mark.parametrize("kind, method, options", [(kind, *case) for kind in OTHERS for case in CASES] + OF_THREE)
def test_every_matrix_has_its_initial_distribution(kind, method, options, wide):
    """Those of merged attention are separate: Xavier's gamma is sqrt(6 / 2C), not that of a fused matrix."""
    checked = 0
    for name, value in wide(kind, method, **options).decoder.layers.named_parameters(prefix="decoder.layers"):
        if value.dim() == 1 and ".residual." not in name:
            assert value.eq(1.0 if "norm" in name and name.endswith("weight") else 0.0).all(), name
        elif value.dim() == 2 and ".residual." not in name:
            found = MATRIX.fullmatch(name)
            own = found is None or ".self_attn.fc" in name or "input_proj" in name
            layer, role = int(name.split(".")[2]) + 1, name.split(".")[-2]
            place = ("decoder", layer, None, LIKE[role]) if own else ("decoder", layer, *found.groups()[2:4])
            distribution, size = expected(method, options, *place, *value.shape, N, M, True)
            if options.get("depth_scaled_kind") == "gpt2":
                scaled = not own and role in ("out_proj", "fc2")
                size = 0.02 / math.sqrt(M * (2 if is_parallel(kind) else 3)) if scaled else 0.02
            check_sample(name, value, distribution, size)
            checked += 1
    own = {"average": 1, "ssru": 2, "merged-average": 1, "merged-self": 4}.get(kind.removesuffix("-ffn"), 0)
    assert checked == M * (6 + own + (2 if "ffn" in kind else 0))


def test_admin_counts_the_sublayers(wide):
    for kind, count in (("average", 3), *((kind, 2) for kind in MERGED)):
        for begin, value in (("logn", naive_connections.admin_omega(count * M)), ("1", (count * M) ** 0.5), ("n", 1.0)):
            for layer in wide(kind, "admin", admin_start=begin).decoder.layers:
                torch.testing.assert_close(layer.residual.weight.detach(), torch.full((count, DIM), value))


@pytest.mark.parametrize("kind", OTHERS)
def test_admin_profile_follows_the_recursion(kind, build, dictionary):
    flags = {**KINDS[kind], "deep_init": "admin", "admin_start": "profile", "encoder_layers": 2, "decoder_layers": 3}
    model, memory = build(POST, **flags), []
    source, lengths, target = make_batch(dictionary, lengths=(5, 5, 5), target_lengths=(6, 6, 6))
    model.encoder.register_forward_hook(lambda _, args, output: memory.append(output["encoder_out"][0]))
    with torch.no_grad():
        model.train()(source, lengths, target)
        mask = naive_average.average_mask(target.ne(PAD))
        context, pairs = (memory[0], lambda b, i, j: True, lambda b, i, j: j <= i, mask), []
        for layer in model.decoder.layers:
            pairs += zip(attention_functions(layer, kind, *context), norms_of(layer, kind))
            weights = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
            pairs.append((naive_connections.feed_forward_function(*weights), affine(layer.final_layer_norm)))
        omegas = naive_connections.profile(start(model.decoder, target), pairs)
    actual = torch.cat([layer.residual.weight.detach() for layer in model.decoder.layers])
    assert len(actual) == len(omegas) == 3 * (2 if is_parallel(kind) else 3)
    torch.testing.assert_close(actual, torch.tensor(omegas)[:, None].expand_as(actual), rtol=1e-4, atol=0)


# the paper's systems: exact counts at its vocabularies of 55,022 entries together (its code has an embedding bias of C
# numbers, which fairseq has not; a W_v of its own would give 67,575,808), dropout and attention dropout
PAPER = {
    "transformer_matt_6l": (66000384 - 512, 0.1, 0.1),
    "transformer_ds_matt_6l": (66000384 - 512, 0.1, 0.1),
    "transformer_ds_matt_12l12l": (103828992 - 512, 0.3, 0.2),
    "transformer_ds_matt_18l18l": (141657600 - 512, 0.3, 0.2),
    "transformer_ds_matt_20l20l": (154267136 - 512, 0.3, 0.2),
    "transformer_ds_matt_30l30l": (217314816 - 512, 0.3, 0.2),
    "transformer_ds_matt_12l12l_big": (358652928 - 1024, 0.3, 0.1),
    "transformer_ds_matt_20l20l_big": (560192512 - 1024, 0.3, 0.1),
}
# the same for 6 layers with another --decoder-attn
ABLATIONS = {
    "self": 72310272 - 512,
    "average": 72304128 - 512,
    "average-ffn": 84902400 - 512,
    "merged": 66000384 - 512,
    "merged-self": 72304128 - 512,
    "merged-average": 72297984 - 512,
    "merged-average-ffn": 84896256 - 512,
    "ssru": 72310272 - 512 - 6 * ((4 * 512**2 + 4 * 512) - (2 * 512**2 + 512)),
}


@pytest.mark.parametrize("name", PAPER)
def test_systems_are_the_papers(name):
    count, dropout, attention_dropout = PAPER[name]
    assert count_parameters(name) == count
    args = parse("--arch", name)
    assert (args.dropout, args.attention_dropout, args.decoder_attn) == (dropout, attention_dropout, "merged")
    assert args.deep_init == ("ds" if "_ds_" in name else "xavier") and ARCHITECTURES[name].norm == "post"


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_counts_of_the_ablations(kind):
    flags = {"decoder_attn": "self", **KINDS[kind]}
    assert size_of(full_size("transformer_matt_6l", 55022, share_all_embeddings=True, **flags)) == ABLATIONS[kind]


@pytest.mark.parametrize("kind, stack", SHALLOW)
def test_dropout_is_once_on_each_sublayer(kind, stack, build, batch):
    """In a depth-wise LSTM, whose layers are their attentions, on the sum of both if they are merged."""
    name, flags = STACKS[stack]
    layer, seen = build(name, dim=64, dropout=0.5, **flags, **KINDS[kind]).decoder.layers[0].train(), []
    layer.dropout_module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    x, memory = torch.randn(6, 4, 64), torch.randn(5, 4, 64)
    layer(x, DecoderContext(memory, mask=torch.zeros(6, 6)))
    assert len(seen) == (1 if is_parallel(kind) else 2) + (stack == "postnorm")
    for whole, dropped in seen:
        alive = whole != 0  # after a ReLU, some are not
        kept = dropped[alive] != 0
        assert alive.float().mean() > 0.3 and 0.3 < kept.float().mean() < 0.7
        torch.testing.assert_close(dropped[alive][kept], 2 * whole[alive][kept])


def test_attention_dropout_leaves_the_mean_alone(build):
    layer = build(POSTNORM, attention_dropout=1.0, decoder_attn="merged").decoder.layers[0].train()
    x, memory, attend = torch.randn(6, 4, 16), torch.randn(5, 4, 16), layer.encoder_attn
    context = DecoderContext(memory, mask=torch.zeros(6, 6))
    output, _ = layer.attend(x, context, True)
    torch.testing.assert_close(output, attend.out_proj(layer.mean(attend.v_proj(x))), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(layer.eval().attend(x, context, True)[0], output, atol=0.1)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_checkpoint_of_another_attention_is_refused(kind, build):
    model, plain = build(POSTNORM, **KINDS[kind]), build(POSTNORM)
    for one, other in ((model, plain), (plain, model)):
        with pytest.raises(UsageError, match="the checkpoint has another architecture.*self_attn") as error:
            one.load_state_dict(other.state_dict())
        assert "\n" not in str(error.value)


def test_the_diagnostics_know_the_merged_sub_layer(build, batch):
    model = build(POSTNORM, decoder_attn="merged").train()
    padding = {"encoder": batch[0].eq(PAD), "decoder": batch[2].eq(PAD)}
    found = sublayer_ratios(model, padding, lambda: model(*batch)[0].square().sum())
    assert [ratios.part for ratios in found["decoder"]] == ["merged", "ffn"] * 2
    assert all(ratios.variance > 0 and ratios.beta > 0 for ratios in found["decoder"])


@pytest.mark.parametrize("kind, stack", SHALLOW)
def test_nothing_of_a_batch_stays_on_the_modules(kind, stack, build, batch):
    name, flags = STACKS[stack]
    model = build(name, **flags, **KINDS[kind])
    model(*batch)[0].sum().backward()
    with torch.no_grad():
        encoder_out = model.eval().encoder(*batch[:2])
        model.decoder(batch[2][:, :1], encoder_out=encoder_out, incremental_state={})
    fairseqs = {"decoder._future_mask", "encoder.embed_positions.weights", "decoder.embed_positions.weights"}
    assert tensors_on_modules(model) <= fairseqs


def steps(model, encoder_out, target, state=None):
    """The scores of the last position of each step."""
    state = {} if state is None else state
    for step in range(1, target.size(1) + 1):
        yield model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)[0][:, -1]


@pytest.mark.parametrize("kind", ["self", "average", "merged", "merged-average", "ssru", "luna"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_left_padding_is_not_counted_in_steps(kind, grad, build, dictionary):
    """fairseq's positions do count it in steps, so that there are none here."""
    model = make_model(build, kind, "postnorm", no_token_positional_embeddings=True).eval()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    target[0] = torch.cat([torch.full((2,), PAD), target[0, :4]])
    with torch.set_grad_enabled(grad):
        encoder_out = model.encoder(source, lengths)
        full = model.decoder(target, encoder_out=encoder_out)[0]
        for step, last in enumerate(steps(model, encoder_out, target)):
            words = target[:, step].ne(PAD)
            torch.testing.assert_close(last[words], full[words, step], **NEAR_FP32)


def numbers(state, kind, names):
    """Entries that caches of *kind* hold under *names*."""
    saved = [cache[name] for key, cache in state.items() if key.endswith(kind) for name in names]
    return sum(tensor.numel() for tensor in saved if tensor is not None)


HELD = {"running_sum": ["vector"], "recurrent_state": ["vector"], "beam_state": ["count"], "target": ["cache"],
        "source": ["key", "value", "bias"]}  # fmt: skip


@pytest.mark.parametrize("kind, stack", SHALLOW)
@torch.no_grad()
def test_the_state_without_self_attention_does_not_grow(kind, stack, build, dictionary):
    """C numbers for each hypothesis and layer, for means one count of its words; keys and values if it attends."""
    model = make_model(build, kind, stack).eval()
    source, lengths, target = make_batch(dictionary, target_lengths=(20, 20, 20))
    encoder_out, state, averages = model.encoder(source, lengths), {}, "self" not in kind and kind != "ssru"
    for step, _ in enumerate(steps(model, encoder_out, target, state), start=1):
        assert {part: numbers(state, part, names) for part, names in HELD.items()} == {
            "running_sum": 3 * 3 * 16 if averages else 0,
            "recurrent_state": 3 * 3 * 16 if kind == "ssru" else 0,
            "beam_state": 3 if averages else 0,
            "target": 3 * 3 * 2 * 16 * step if "self" in kind else 0,
            "source": 3 * 2 * source.numel() * 16 + 3 * source.numel(),
        }


@pytest.mark.parametrize("kind", ["self", "average", *MERGED])
@torch.no_grad()
def test_the_source_is_projected_once_per_sentence(kind, build, dictionary):
    """Values of the target in merged attention pass through the same matrix at each step."""
    model = make_model(build, kind, "postnorm").eval()
    source, lengths, target = make_batch(dictionary, lengths=(5, 7), target_lengths=(4, 4))
    calls, order = {"k": [], "v": []}, torch.arange(2).repeat_interleave(4)
    for name, seen in calls.items():
        hook = lambda _, args, output, seen=seen: seen.append(tuple(args[0].shape[:2]))  # noqa: E731
        getattr(model.decoder.layers[1].encoder_attn, f"{name}_proj").register_forward_hook(hook)
    encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), order)
    assert len(list(steps(model, encoder_out, target[order]))) == 4
    assert calls["k"] == [(7, 2)], "of the two sentences, not of their eight hypotheses"
    assert sorted(calls["v"]) == sorted([(7, 2), *([(1, 8)] * 4 if kind == "merged" else [])])


LSTM = "transformer_lstm_6l"
TOGETHER = [
    (POST, {"decoder_attn": "merged", "deep_init": "xavier", "encoder_deep_init": "deepnet"}),
    (POST, {"decoder_attn": "merged", "decoder_layerdrop": 0.2}),
    (LSTM, {"decoder_attn": "merged-self", "relative_positions": 2}),
    (POST, {"decoder_attn": "ssru", "no_cross_attention": True, "deep_init": "lipschitz"}),
    (LSTM, {"decoder_attn": "merged", "decoder_layer_agg": "residual", "decoder_ffn_embed_dim": 32}),
    ("transformer_dlcl_6l", {"decoder_attn": "merged", "decoder_layer_agg": "lstm", "decoder_ffn_embed_dim": None}),
]


@pytest.mark.parametrize("name, flags", TOGETHER, ids=str)
def test_what_goes_together_trains(name, flags, build, batch):
    model = build(name, **flags).train()
    output = model(*batch)[0]
    assert output.isfinite().all()
    output.square().mean().backward()
    used = [parameter.grad is not None for parameter in model.decoder.layers.parameters()]
    assert any(used) and (all(used) or "decoder_layerdrop" in flags)
