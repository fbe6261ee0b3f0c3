"""Command lines of fairseq-train drawn at random, and what must hold for each of them.

A draw is refused in one line before the first update, or trains three updates with finite losses and a gradient for
every parameter, saves, loads, decodes a step at a time as all at once, and is unchanged by padding and by the order of
hypotheses. 10 draws, the same in each run, and 150 at night.
"""

import argparse
import functools
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, safe_stop
from fairseq.models.transformer import TransformerModel
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
from hypothesis import note
from hypothesis import strategies as st

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.fuzz import fuzzed
from tests.helpers.invariances import (
    padding_and_batch_composition_change_nothing,
    steps_of_decoding_equal_whole_sentences,
)
from tests.helpers.methods import METHODS, OPTIONS

UPDATES = 3
INTEGERS = (-1, 0, 1, 2, 3, 4, 8, 16, 100)
NUMBERS = (-0.1, 0, 0.1, 0.5, 1, 2, "nan")
SWITCH = (None,)


# flags of fairseq's Transformer whose values are words, or that would be refused with nearly all numbers
FAIRSEQS = {
    **{f"--{side}-{name}": values for side in ("encoder", "decoder") for name, values in {
        "embed-dim": (8, 16, 24), "ffn-embed-dim": (0, 8, 16), "layers": (0, 1, 3, 4), "attention-heads": (1, 2, 3, 4),
        "layers-to-keep": ("0", "0,1", "5"), "layerdrop": (0.2,), "xformers-att-config": ("{}",), "embed-path": ("x",),
    }.items()},
    "--adaptive-softmax-cutoff": ("4,8",),
    "--dropout": (0, 0.1, 0.5),
    "--quant-noise-pq-block-size": (4, 8),
    "--max-source-positions": (4, 1024),
}  # fmt: skip
# flags of its training
TRAINING = {
    **dict.fromkeys("""
        --fp16 --bf16 --memory-efficient-bf16 --memory-efficient-fp16 --sentence-avg --fp16-no-flatten-grads
        --left-pad-target --skip-invalid-size-inputs-valid-test --truncate-source --no-epoch-checkpoints
        --no-save-optimizer-state --store-ema --report-accuracy --eval-bleu --load-alignments
    """.split(), SWITCH),
    **dict.fromkeys(("--save-interval-updates", "--validate-interval-updates", "--keep-interval-updates",
                     "--keep-best-checkpoints", "--curriculum", "--seed", "--update-freq"), (1, 2)),
    "--optimizer": ("adam", "fused_adam", "adafactor", "sgd", "nag", "adagrad", "adadelta", "adamax"),
    "--lr-scheduler": ("inverse_sqrt", "fixed", "cosine", "polynomial_decay", "tri_stage", "pass_through",
                       "reduce_lr_on_plateau", "triangular"),
    "--criterion": ("cross_entropy", "label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy",
                    "adaptive_loss", "latency_augmented_label_smoothed_cross_entropy"),
    "--label-smoothing": (0, 0.1),
    "--clip-norm": (0, 0.1, 25),
    "--weight-decay": (0, 0.01),
    "--batch-size": (1, 2, 7),
    "--max-tokens": (20, 100, 400),
    "--required-batch-size-multiple": (1, 8),
    "--left-pad-source": ("False",),
    "--source-lang": ("src", "tgt"),
    "--best-checkpoint-metric": ("loss", "ppl"),
    "--on-divergence": ("stop", "rewind"),
    "--ema-decay": (0.9,),
    "--lr": (1e-3, 1e-2),
    "--warmup-updates": (1, 3),
    "--adam-betas": ("(0.9,0.98)",),
    "--ddp-backend": ("legacy_ddp", "pytorch_ddp", "no_c10d"),
}  # fmt: skip


WARMING = ("inverse_sqrt", "fixed", "cosine", "polynomial_decay")  # schedules with --warmup-updates
LEFT = ("--compile", "--init-from")  # which take half a minute, and a file


@functools.cache
def model_flags():
    """Flags of models and of training with values for each, right and wrong; those of fairseq's own, and the others."""
    parsers = [argparse.ArgumentParser(add_help=False) for _ in range(2)]
    TransformerModel.add_args(parsers[0])
    DeepTransformerModel.add_args(parsers[1])
    fairseqs, both = ({action.option_strings[0]: action for action in parser._actions} for parser in parsers)
    values = {flag: _values(flag, action) for flag, action in both.items() if flag not in LEFT}
    stock = {flag: found for flag, found in values.items() if flag in fairseqs and found}
    return {**stock, **TRAINING}, {flag: found for flag, found in values.items() if flag not in fairseqs and found}


def _values(flag, action):
    registered = getattr(getattr(action.type, "__self__", None), "names", lambda: None)()
    known = FAIRSEQS.get(flag) or registered or action.choices or {int: INTEGERS, float: NUMBERS}.get(action.type)
    return SWITCH if action.nargs == 0 else known


@st.composite
def command_lines(draw):
    """Words after ``fairseq-train DATA``: a model of the tests of methods, and a few more flags."""
    name, flags = draw(st.sampled_from([*METHODS.values(), *OPTIONS.values()]))
    chosen = {f"--{flag.replace('_', '-')}": SWITCH[0] if value is True else value for flag, value in flags.items()
              if value not in (None, False)}  # fmt: skip
    for drawn, most in zip(model_flags(), (6, 1)):
        for flag in draw(st.lists(st.sampled_from(sorted(drawn)), max_size=most, unique=True)):
            chosen[flag] = draw(st.sampled_from(list(drawn[flag])))
    if chosen.setdefault("--lr-scheduler", "inverse_sqrt") in WARMING:
        chosen.setdefault("--warmup-updates", 2)
    return ["--arch", name, *(str(word) for pair in chosen.items() for word in pair if word is not None)]


BASE = ["--optimizer", "adam", "--lr", "1e-3", "--criterion", "label_smoothed_cross_entropy", "--max-tokens", "150",
        "--seed", "5", "--cpu", "--encoder-embed-dim", "16", "--decoder-embed-dim", "16", "--encoder-attention-heads",
        "2", "--decoder-attention-heads", "2", "--num-workers", "0", "--max-update", str(UPDATES)]  # fmt: skip


def train(data, folder, words):
    """How fairseq-train ends here ("", a line, or an error), its losses, and parameters without a finite gradient."""
    losses, missing, step = [], set(), Trainer.train_step

    def train_step(trainer, *given, **options):
        logged = step(trainer, *given, **options)
        losses.append(logged["loss"])
        missing.update(name for name, parameter in trainer.get_model().named_parameters() if parameter.requires_grad
                       and (parameter.grad is None or not parameter.grad.isfinite().all()))  # fmt: skip
        return logged

    without_ffn = any(name in " ".join(words) for name in ("lstm", "rnn"))
    narrow = [] if without_ffn else ["--encoder-ffn-embed-dim", "32", "--decoder-ffn-embed-dim", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(safe_stop.Stop, "listen", lambda stop: None)
        patch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)  # of another training
        patch.setattr(sys, "argv", ["fairseq-train", str(data), "--save-dir", str(folder), *BASE, *narrow, *words])
        try:
            return cli_main() or "", losses, missing
        except SystemExit as end:
            return str(end.code), losses, missing
        except Exception as error:
            return error, losses, missing


def check(data, folder, words):
    """What must hold for a draw, whose flags come last and so win; whether it was refused."""
    ended, losses, missing = train(data, folder / "save", words)
    if ended and not losses:
        if isinstance(ended, Exception):  # fairseq's own Transformer with those flags that it knows must end alike
            known, kept, keep = model_flags()[0], [], False
            for word in words:
                keep = word in known if word.startswith("--") else keep
                kept += [word] if keep else []
            assert repr(train(data, folder / "stock", ["--arch", "transformer", *kept])[0]) == repr(ended)
        assert isinstance(ended, Exception) or "\n" not in ended
        return True
    assert not ended and len(losses) == UPDATES and all(map(math.isfinite, losses)), (ended, losses)
    assert [name for name in missing if not _unused(name, words)] == [], "no finite gradient"
    path = str(folder / "save/checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": str(data)})
    model.double()  # some methods, such as EM routing, amplify the rounding of fp32 a thousandfold
    for holds in (steps_of_decoding_equal_whole_sentences, padding_and_batch_composition_change_nothing):
        torch.manual_seed(1)
        holds(lambda: model, task.source_dictionary)
    return False


def _unused(name, words):
    """Whether the parameter *name* can have no use: a layer that all updates drop, an encoder that nothing reads."""
    of_layer = ".layers." in name or ".layer_norms." in name
    dropped = any(word.endswith("-layerdrop") for word in words) and of_layer
    alone = "--no-cross-attention" in words or "--decoder-layers 0" in " ".join(words)
    return dropped or alone and name.startswith("encoder.")


@pytest.mark.fuzz
def test_a_draw_is_refused_or_holds(small, tmp_path):
    outcomes = []

    @fuzzed(10, words=command_lines())
    def draw(words):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            note(" ".join(words))
            outcomes.append(check(small, Path(folder), words))

    draw()
    assert {*outcomes} == {True, False}, "draws of either kind"
