"""The twins of fairseq's architectures: the same model without a method, and all flags of this package."""

import argparse
import copy

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer import TransformerModel

from fairseq_deep.core.checkpoints import upgrade_layers
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import TWINS, build_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.commands import refusal, run, train_command
from tests.helpers.flags import parse
from tests.helpers.models import make_tagged_dictionary, task_of

NARROW = {"encoder_layers": 2, "decoder_layers": 2}


@pytest.mark.parametrize("twin, stock", TWINS.items())
def test_a_twin_is_the_stock_model(twin, stock, dictionary):
    """Its flags and parameters; the encoder layers of fairseq 0.12.2 have unused copies besides."""
    task = task_of(dictionary)
    flags = {name: argparse.Namespace(**NARROW) for name in (stock, twin)}
    for name, given in flags.items():
        ARCH_CONFIG_REGISTRY[name](given)
    for name, value in vars(flags[stock]).items():
        assert getattr(flags[twin], name) == value, name
    theirs, ours = TransformerModel.build_model(flags[stock], task), DeepTransformerModel.build_model(flags[twin], task)
    state = theirs.state_dict()
    upgrade_layers(state)
    shapes = [{name: value.shape for name, value in each.items()} for each in (state, ours.state_dict())]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("twin, stock", TWINS.items())
def test_a_twin_has_our_flags_and_the_stock_architecture_names_it(twin, stock):
    args = parse("--arch", twin, "--layer-agg", "dlcl", "--dlcl-window", "2")
    assert (args.layer_agg, args.dlcl_window) == ("dlcl", 2)
    assert args.encoder_embed_dim == parse("--arch", stock).encoder_embed_dim
    for flag in ("--layer-agg", "--dlcl-window", "--compile"):
        with pytest.raises(UsageError) as error:
            parse("--arch", stock, flag, *(["3"] if flag != "--compile" else []))
        assert str(error.value) == f"{flag} requires an architecture of this package: use --arch {twin}, the same " \
            "model with our flags"  # fmt: skip


def test_a_twin_does_not_resume_with_the_stock_optimizer(small, tmp_path):
    def train(arch, *more):
        return run(*train_command(small, tmp_path, "--max-update", *more, arch=arch), check=False)

    assert train("transformer", "1").returncode == 0
    last = refusal(train("deep_transformer", "2"))
    assert "optimizer state has another number of parameters" in last
    assert "add --reset-optimizer, or resume with the checkpoint's --arch" in last
    assert train("deep_transformer", "2", "--reset-optimizer").returncode == 0


ARCH = ("--arch", "transformer_dlcl_2l2l_tiny")
LSTM = ("--arch", "transformer_lstm_2l2l_tiny")
SCALED = ("--arch", "transformer_prenorm_2l2l_tiny", "--residual", "layerscale")
ODE = ("--arch", "transformer_prenorm_2l2l_tiny", "--layer-agg", "ode", "--ode-history", "dlcl")
STOCK = ("--arch", "transformer_iwslt_de_en")


@pytest.mark.parametrize("old, new, found", [
    (ARCH, (*ARCH, "--dropout", "0.4", "--dlcl-dropout", "0.1", "--checkpoint-activations"), ""),
    (ARCH, (*ARCH, "--max-source-positions", "50", "--deep-init", "xavier", "--dlcl-init", "one"), ""),
    (LSTM, (*LSTM, "--lstm-forget-bias", "1"), ""),
    (SCALED, (*SCALED, "--layerscale-start", "0.5"), ""),
    (ARCH, (*ARCH, "--layer-agg", "dlcl", "--activation-fn", "relu", "--encoder-layer-agg", "dlcl"), ""),
    (ARCH, (*ARCH, "--encoder-attention-heads", "16"), "--encoder-attention-heads 16 (checkpoint: 2)"),
    (ARCH, (*ARCH, "--activation-fn", "gelu"), "--activation-fn gelu (checkpoint: relu)"),
    (ARCH, (*ARCH, "--no-scale-embedding"), "--no-scale-embedding set (checkpoint: unset)"),
    ((*ARCH, "--dlcl-window", "1"), ARCH, "--dlcl-window unset (checkpoint: 1)"),
    (ODE, (*ODE, "--dlcl-window", "1"), "--dlcl-window 1 (checkpoint: unset)"),
    ((*ARCH, "--residual", "completep", "--layer-agg", "residual"), (*ARCH, "--layer-agg", "residual"), "-residual "),
    (STOCK, ("--arch", "deep_transformer_iwslt_de_en", "--dropout", "0.3"), ""),
    (STOCK, ("--arch", "deep_transformer_iwslt_de_en", "--encoder-attention-heads", "8"), "8 (checkpoint: 4)"),
    (STOCK, ("--arch", "transformer", "--encoder-ffn-embed-dim", "1024"), "--encoder-attention-heads 8"),
])  # fmt: skip
def test_settings_that_change_the_function_but_no_shape(old, new, found, caplog):
    state, cfg = ({"cfg": {"model": argparse.Namespace(**vars(flags), _name=flags.arch)}}
                  for flags in (parse(*old), parse(*new)))  # fmt: skip
    check = TransformerModel.check_settings
    check(cfg["cfg"]["model"], state, resumes=False)  # fine-tuning: only a warning
    assert found in caplog.text and bool(found) == ("computes another function" in caplog.text)
    if found:
        with pytest.raises(UsageError) as error:
            check(cfg["cfg"]["model"], state, resumes=True)
        assert found in str(error.value) and "dropout" not in str(error.value)


def test_attention_on_a_gpu_uses_torchs_own_kernels():
    """cuDNN's prepare a plan for each new shape of a batch."""
    asked = getattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not asked()


@pytest.mark.parametrize("fp32", [False, True])
def test_an_average_of_models_copies_buffers(fp32):
    """``--store-ema`` with tags of target languages, whose indices cannot decay, and the factor of BranchNorm."""
    tagged = make_tagged_dictionary(20, 3)
    model = build_architecture("transformer_postnorm_2l2l_tiny", tagged, language_norm=True, residual="branchnorm")
    ema = EMA(copy.deepcopy(model), EMAConfig(store_ema=True, ema_decay=0.5, ema_fp32=fp32))
    model.encoder.language_index.tags.fill_(7)
    model.encoder.layers[0].residual.scale.fill_(1)
    with torch.no_grad():
        before = model.encoder.layers[0].fc1.weight.clone()
        model.encoder.layers[0].fc1.weight.add_(1)
    ema.step(model, 1)
    found = ema.get_model().encoder
    assert found.language_index.tags.eq(7).all() and found.layers[0].residual.scale == 1
    assert torch.allclose(found.layers[0].fc1.weight, before + 0.5)
