"""What must hold for every model, whatever its methods.

Each function takes ``make(**flags)``, which builds a narrow model without dropout, and the vocabulary.
``INVARIANCES`` has them all by name.
"""

import copy

import torch

from fairseq_deep.core.aggregators.routing import EmRouting
from fairseq_deep.core.norms import normalise
from tests.helpers.models import make_batch
from tests.helpers.tensors import shake, tensors_on_modules

# a fresh 24-layer depth-wise LSTM amplifies the rounding of fp32 about a hundredfold
NEAR = {"rtol": 1e-4, "atol": 1e-4}


# fairseq's own: tables of positions, and a mask that grows
KEPT = {"decoder._future_mask", "encoder.embed_positions.weights", "decoder.embed_positions.weights"}


def features(model, source, lengths, target):
    return model(source, lengths, target)[0]


def every_parameter_gets_a_finite_gradient(make, dictionary):
    """With weights that are not at a special point, as zeros at the start may be."""
    batch, model = make_batch(dictionary), shake(make().train(), 0.05, around=True)
    output = features(model, *batch)
    assert output.isfinite().all()
    words = torch.randint(len(dictionary), (output[..., 0].numel(),))
    torch.nn.functional.cross_entropy(output.flatten(0, 1), words).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        # a key bias shifts all scores of a query alike, so that its gradient is rounding only
        assert parameter.grad.any() or key.endswith("k_proj.bias"), key
    assert tensors_on_modules(model) <= KEPT, "something stays on the modules"


def a_loaded_model_gives_the_same_output(make, dictionary):
    batch, model, other = make_batch(dictionary), make().eval(), make().eval()
    with torch.no_grad():
        expected = features(model, *batch)
        assert not torch.equal(expected, features(other, *batch))
        other.load_state_dict(model.state_dict())
        assert torch.equal(expected, features(other, *batch))


def steps_of_decoding_equal_whole_sentences(make, dictionary):
    """As in beam search: two sentences of two hypotheses each, reordered; then a sentence has one, and loses it."""
    model = make().eval()
    source, lengths, target = make_batch(dictionary, lengths=(5, 3), target_lengths=(6, 6, 6, 6))
    owner = torch.tensor([0, 0, 1, 1])
    with torch.no_grad():
        encoded, state = model.encoder(source, lengths), {}
        encoder_out = model.encoder.reorder_encoder_out(encoded, owner)
        for name in ("encoder_out", "encoder_memories"):
            same = map(torch.Tensor.is_set_to, encoder_out.get(name, []), encoded.get(name, []))
            assert all(same), "a source is copied"
        for step, order in enumerate(([1, 0, 2, 2], [3, 2, 0, 1], [2, 0, 1], [1, 2]), start=1):
            model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)
            order = torch.tensor(order)
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out, target = model.encoder.reorder_encoder_out(encoder_out, order), target[order]
            owner = owner[order]
            full = model.decoder(target, encoder_out=model.encoder(source[owner], lengths[owner]))[0]
            ahead = {key: dict(cache) for key, cache in state.items()}
            last = model.decoder(target[:, : step + 1], encoder_out=encoder_out, incremental_state=ahead)[0]
            torch.testing.assert_close(last[:, -1], full[:, step], **NEAR)
    assert tensors_on_modules(model) <= KEPT, "something stays on the modules"


def padding_and_batch_composition_change_nothing(make, dictionary):
    model = make().eval()
    source, lengths, target = make_batch(dictionary)
    pad = dictionary.pad()
    with torch.no_grad():
        together = features(model, source, lengths, target)
        for row in range(len(source)):
            words, outputs = source[row][source[row] != pad], target[row][target[row] != pad]
            alone = features(model, words[None], lengths[row : row + 1], outputs[None])[0]
            torch.testing.assert_close(together[row, : len(outputs)], alone, **NEAR)
            padding = torch.full((2,), pad)
            right = features(model, torch.cat([words, padding])[None], lengths[row : row + 1], outputs[None])[0]
            torch.testing.assert_close(right, alone, **NEAR)
            left = features(model, words[None], lengths[row : row + 1], torch.cat([padding, outputs])[None])[0]
            torch.testing.assert_close(left[2:], alone, **NEAR)


def activation_checkpointing_changes_nothing(make, dictionary):
    results, batch = [], make_batch(dictionary)
    for recompute in (False, True):
        torch.manual_seed(3)
        model = make(checkpoint_activations=recompute, dropout=0.1).train()
        calls = []
        for stack in (model.encoder, model.decoder):
            dropout = next(module for name, module in stack.layers[-1].named_modules() if name == "dropout_module")
            dropout.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        output = features(model, *batch)
        once = len(calls)
        output.square().mean().backward()
        assert len(calls) == (2 * once if recompute else once), "each layer runs again in the backward pass"
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def hidden_states_lead_from_the_embedding_to_the_output(make, dictionary):
    """The last is the output before final norms or, where a sum over layers follows, the output of the last layer.

    Unless a layer gives more than a state: Luna's packed sequence, or several evaluations.
    """
    (source, lengths, target), model, returned = make_batch(dictionary), make().eval(), {}
    for stack in (model.encoder, model.decoder):
        stack.layers[-1].register_forward_hook(lambda _, args, output, stack=stack: returned.update({stack: output[0]}))
    with torch.no_grad():
        encoded = model.encoder(source, lengths, return_all_hiddens=True)
        features, extra = model.decoder.extract_features(target, encoder_out=encoded)
    languages = encoded.get("languages", [None])[0]
    for stack, states, output in (
        (model.encoder, encoded["encoder_states"], encoded["encoder_out"][0]),
        (model.decoder, extra["inner_states"], features.transpose(0, 1)),
    ):
        assert len(states) == len(stack.layers) // stack.modules_per_layer + 1
        assert all(state.shape == output.shape for state in states)
        last, normalised = returned[stack], states[-1]
        for norm in (getattr(stack.aggregator, "final_norm", None), stack.layer_norm):
            normalised = normalised if norm is None else normalise(norm, normalised, languages)
        if languages is not None and getattr(stack, "language_transform", None) is not None:
            normalised = stack.language_transform(normalised, languages)
        if last.shape == output.shape and stack.aggregator.num_evaluations == 1:
            assert torch.allclose(normalised, output, **NEAR) or torch.equal(states[-1], last)


def lower_precision_is_finite_and_near(make, dictionary):
    """All in bf16 or fp16, and as under --amp, where layer outputs, norms and the embedding come in different types.

    Near means: far below the spread of the outputs, at any depth, and for the gradient a share of its size. A model
    whose layers amplify every difference (untrained depth-wise LSTMs from 12 layers on) is no nearer than what the
    rounding of its weights alone changes.
    """
    batch, model = make_batch(dictionary), make().train()

    def gradient(model, amp=False):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            output = features(model, *batch)
        (128 * output.float().square().mean()).backward()  # a loss scale
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.dtype == parameter.dtype, name
        return output.detach(), torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])

    # EM routing divides by variances that can be near to nothing
    routes = any(isinstance(part, EmRouting) for part in model.modules())
    (exact, direction), mixed = gradient(model), gradient(model, amp=True)
    for dtype, share in ((torch.bfloat16, 0.5), (torch.float16, 0.5 if routes else 0.05)):
        half = copy.deepcopy(model).to(dtype)
        found, limits = gradient(half), (0.1 * exact.std(), share * direction.norm())
        assert found[0].dtype == dtype
        for output, grads in (found, mixed) if dtype == torch.bfloat16 else (found,):
            assert output.isfinite().all() and not torch.equal(output.float(), exact)
            errors = (output.float() - exact).abs().mean(), (grads - direction).norm()
            if errors[0] >= limits[0] or errors[1] >= limits[1]:
                rounded, unavoidable = gradient(half.float())
                limits = 4 * (rounded - exact).abs().mean(), 4 * (unavoidable - direction).norm()
                assert errors[0] < max(0.1 * exact.std(), limits[0])
                assert errors[1] < max(share * direction.norm(), limits[1])


INVARIANCES = {
    check.__name__: check
    for check in (
        every_parameter_gets_a_finite_gradient,
        a_loaded_model_gives_the_same_output,
        steps_of_decoding_equal_whole_sentences,
        padding_and_batch_composition_change_nothing,
        activation_checkpointing_changes_nothing,
        hidden_states_lead_from_the_embedding_to_the_output,
        lower_precision_is_finite_and_near,
    )
}
