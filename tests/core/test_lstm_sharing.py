"""What depth-wise LSTMs share is one module: in the model, its gradient, its checkpoint and its copies."""

import copy

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin import compat
from fairseq_deep.tools.main import main
from tests.helpers.lstm import aggregators
from tests.helpers.methods import LSTM as TINY
from tests.helpers.tools import checkpoint

# {sharing: (gate sets and hidden computations of the encoder, and of the decoder, that are in the state)}
SETS = {"none": ((2, 2), (2, 2)), "gate": ((1, 2), (1, 2)), "gate-encdec": ((1, 2), (0, 2)), "all": ((1, 1), (0, 1))}
GATE_SET = 6 * 16 * 16 + 6 * 16  # numbers in it at the width of the narrow models
HIDDEN = 2 * 16 * 64 + 2 * 64 + 32 * 16


def modules(state, stack, kind):
    """Indices of the shared modules of *kind* that are in a state dictionary."""
    prefix = f"{stack}.history.{kind}."
    return {key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)}


def test_stacks_of_one_large_width_share(build):
    """Python has one object for each small integer, and several for 512."""
    widths = {"encoder_embed_dim": 512, "decoder_embed_dim": int("512")}
    encoder, decoder = aggregators(build(TINY, lstm_share="gate-encdec", **widths))
    assert encoder.gates is decoder.gates


@pytest.mark.parametrize("share", SETS)
def test_a_shared_module_is_one_object_and_one_entry(share, build):
    model = build(TINY, lstm_share=share)
    state = model.state_dict()
    for stack, (gates, hidden) in zip(("encoder", "decoder"), SETS[share]):
        assert len(modules(state, stack, "gates")) == gates
        assert len(modules(state, stack, "hidden")) == hidden
    encoder, decoder = aggregators(model)
    across = share in ("gate-encdec", "all")
    assert (encoder.gates[0] is decoder.gates[0]) is across
    assert encoder.hidden[0] is not decoder.hidden[0]
    pointers = [tensor.data_ptr() for key, tensor in state.items() if ".history." in key]
    assert len(set(pointers)) == len(pointers), "nothing is in the state twice"
    listed = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(listed)) == len(listed)


def test_parameters_counts_what_is_shared_once(build):
    counts = {share: sum(p.numel() for p in build(TINY, lstm_share=share).parameters()) for share in SETS}
    for share in ("gate", "gate-encdec", "all"):
        gates, hidden = (sum(sets[i] for sets in SETS["none"]) - sum(sets[i] for sets in SETS[share]) for i in (0, 1))
        assert counts["none"] - counts[share] == gates * GATE_SET + hidden * HIDDEN


def unshare(shared, alone):
    """Make *alone*, which shares nothing, equal to *shared*, by the rule of which step has which module."""
    rest = {key: value for key, value in shared.state_dict().items() if ".history." not in key}
    torch.nn.Module.load_state_dict(alone, rest, strict=False)
    for ours, theirs in zip(aggregators(shared), aggregators(alone)):
        for kind in ("gates", "hidden"):
            for step, module in enumerate(getattr(theirs, kind)):
                modules = getattr(ours, kind)
                module.load_state_dict(modules[step % len(modules)].state_dict())


@pytest.mark.parametrize("merge", ["add", "concat", "two"])
@pytest.mark.parametrize("share", ["gate", "gate-encdec", "all"])
def test_gradients_of_what_is_shared_add(share, merge, build, batch):
    """The gradient of a shared module is the sum over the steps of an unshared model with equal weights."""
    if merge != "add" and share != "gate":
        with pytest.raises(UsageError):
            build(TINY, lstm_share=share, lstm_merge=merge)
        return
    shared = build(TINY, lstm_share=share, lstm_merge=merge).double()
    alone = build(TINY, lstm_share="none", lstm_merge=merge).double()
    unshare(shared, alone)
    scores = [model(*batch)[0] for model in (shared, alone)]
    torch.testing.assert_close(*scores)
    direction = torch.randn_like(scores[0])
    for output in scores:
        output.backward(direction)
    sums = {}
    for ours, theirs in zip(aggregators(shared), aggregators(alone)):
        for kind in ("gates", "hidden"):
            common = getattr(ours, kind)
            for step, module in enumerate(getattr(theirs, kind)):
                for mine, its in zip(common[step % len(common)].parameters(), module.parameters()):
                    sums[mine] = sums.get(mine, 0) + its.grad
    assert len(sums) == sum(1 for name, _ in shared.named_parameters() if ".history." in name)
    for parameter, total in sums.items():
        torch.testing.assert_close(parameter.grad, total)


def test_first_and_second_steps_of_two_share_among_themselves(build):
    decoder = build("transformer_lstm_6l", lstm_merge="two").decoder.aggregator
    assert len(decoder.gates) == 2 and len(decoder.hidden) == 12
    assert decoder.gates[0] is not decoder.gates[1]
    calls = []
    for place, gates in enumerate(decoder.gates):
        gates.register_forward_hook(lambda *_, place=place: calls.append(place))
    state = decoder.start(torch.randn(2, 1, 16))
    for step in range(12):
        state = decoder.write(state, step, torch.randn(2, 1, 16))
    assert calls == [0, 1] * 6


@pytest.mark.parametrize("share", SETS)
def test_a_checkpoint_restores_and_keeps_the_sharing(share, build, batch, tmp_path):
    model, other = (build(TINY, lstm_share=share).eval() for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    shared_gates = aggregators(other)[1].gates
    other.load_state_dict(saved, strict=True)
    assert torch.equal(model(*batch)[0], other(*batch)[0])
    assert aggregators(other)[1].gates is shared_gates
    assert (aggregators(other)[0].gates[0] is shared_gates[0]) is (share in ("gate-encdec", "all"))


@pytest.mark.parametrize("share", ["gate-encdec", "all"])
def test_averaging_has_one_entry_and_counts_it_once(share, build, batch, tmp_path, capsys):
    models = [build(TINY, lstm_share=share).eval() for _ in range(2)]
    paths = [checkpoint(tmp_path / f"{index}.pt", model.state_dict()) for index, model in enumerate(models)]
    assert main(["average", "--inputs", *paths, "--output", str(tmp_path / "out.pt")]) == 0
    capsys.readouterr()
    averaged = compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]
    assert averaged.keys() == models[0].state_dict().keys()
    assert modules(averaged, "encoder", "gates") == {"0"} and not modules(averaged, "decoder", "gates")
    mean = build(TINY, lstm_share=share).eval()
    with torch.no_grad():
        for target, *sources in zip(*(model.parameters() for model in (mean, *models))):
            target.copy_(sum(sources) / 2)
    loaded = build(TINY, lstm_share=share).eval()
    loaded.load_state_dict(averaged, strict=True)
    torch.testing.assert_close(loaded(*batch)[0], mean(*batch)[0])
    assert aggregators(loaded)[0].gates[0] is aggregators(loaded)[1].gates[0]


@pytest.mark.parametrize("share", ["gate-encdec", "all"])
def test_copies_keep_the_sharing(share, build, batch):
    model = build(TINY, lstm_share=share).eval()
    twin = copy.deepcopy(model)
    encoder, decoder = aggregators(twin)
    assert encoder.gates[0] is decoder.gates[0]
    assert encoder.gates[0] is not model.encoder.aggregator.gates[0]
    assert twin.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        for parameter in encoder.gates.parameters():
            parameter.add_(0.5)
    assert not torch.equal(twin(*batch)[0], model(*batch)[0])
    assert torch.equal(decoder.gates[0].norm_bias, model.decoder.aggregator.gates[0].norm_bias + 0.5)
    for converted in (twin.half(), twin.float(), twin.double()):
        assert converted.encoder.aggregator.gates[0].weight is converted.decoder.aggregator.gates[0].weight


def test_the_state_of_a_wrapper_has_one_entry_too(build):
    """As of a model in DistributedDataParallel, whose names have a prefix."""
    model = build(TINY, lstm_share="gate-encdec")
    wrapped = torch.nn.ModuleDict({"module": model}).state_dict()
    assert set(wrapped) == {f"module.{key}" for key in model.state_dict()}


@pytest.mark.parametrize("theirs, ours", [(a, b) for a in SETS for b in SETS if a != b])
def test_a_checkpoint_with_another_sharing_is_refused(theirs, ours, build):
    model = build(TINY, lstm_share=ours)
    with pytest.raises(UsageError) as error:
        model.load_state_dict(build(TINY, lstm_share=theirs).state_dict(), strict=True)
    assert "another architecture" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda model: torch.nn.ModuleDict({"m": model})])
def test_a_wrapper_loads_its_own_state(wrap, build, batch):
    first, second = build(TINY, lstm_share="gate-encdec").eval(), build(TINY, lstm_share="gate-encdec").eval()
    state = wrap(first).state_dict()
    assert not [name for name in state if ".decoder.history.gates." in name]
    wrap(second).load_state_dict(state)
    assert torch.equal(second(*batch)[0], first(*batch)[0])
