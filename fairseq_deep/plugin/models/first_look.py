"""Checks of a new run's flags, before an architecture fills in its presets."""

import argparse
import logging
import os
from typing import Any

from omegaconf import OmegaConf, open_dict

from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.description import SIDED, SIDES
from fairseq_deep.core.inits import INITS
from fairseq_deep.plugin.compat import load_checkpoint, model_flags, to_restore
from fairseq_deep.plugin.training import check_training

from . import hydra

logger = logging.getLogger(__name__)

INIT_FLAGS = ("deep_init", *(f"{side}_deep_init" for side in SIDES))


def look_at(args: Any) -> bool:
    """Check the flags of a command line or of a configuration; flags of a checkpoint are not checked.

    Args:
        args: a namespace, or the part ``model`` of a Hydra configuration; nested keys become flat

    Returns:
        whether these are flags of a new model, not of a checkpoint

    Raises:
        UsageError: one line that names the flags and the fix
    """
    if not OmegaConf.is_config(args):
        new = not hasattr(args, "_name")
        if new and hasattr(args, "ddp_backend"):
            check_training(args)
            _keep_flags(args)
        return new
    hydra.flatten(args)
    flags = hydra.flags_of_run(args)
    if not hasattr(flags, "ddp_backend"):
        return True
    check_training(flags)
    _keep_flags(flags)
    known, own = hydra.known_flags(), {*_init_options(), "lstm_attn_residual"}
    with open_dict(args):
        for name, value in vars(flags).items():
            if name in known and (name in args or name in own) and value != args.get(name):
                args[name] = value
    return True


def has_old_query(old: Any) -> bool:
    """Return whether a checkpoint of the LSTM or RNN with flags *old* has the query LN(S): see ``lstm.md``."""
    merges = old.get("lstm_merge") == "two" or DECODER_ATTENTIONS.get(old.get("decoder_attn") or "self").parallel
    method = old.get("decoder_layer_agg") or old.get("layer_agg")
    return method in ("lstm", "rnn") and not merges and not old.get("lstm_attn_residual")


def _init_options() -> dict:
    """Return the flags of initialisations and their options, with the value to use if a checkpoint lacks the flag."""
    flags = argparse.Namespace(**dict.fromkeys(hydra.known_flags(), 0))
    options = {f"{INITS.prefix(name)}_{option}" for name in INITS.names() for option in INITS.options(flags, name)}
    return {**dict.fromkeys(options), **dict.fromkeys(INIT_FLAGS), "deep_init": SIDED["deep_init"][1]}


def _keep_flags(flags: argparse.Namespace) -> None:
    """Keep the initialisation of a resumed run, and the query of the LSTM's attention also of a fine-tuned model."""
    given = [f"--{name.replace('_', '-')}" for name in INIT_FLAGS if getattr(flags, name, None)]
    methods = [str(getattr(flags, name, None)) for name in ("arch", "layer_agg", "decoder_layer_agg")]
    recurrent = any("lstm" in name or "rnn" in name for name in methods)
    path = getattr(flags, "restore_file", None) or "checkpoint_last.pt"
    if path == "checkpoint_last.pt":
        path = to_restore(flags.save_dir, getattr(flags, "no_last_checkpoints", False))
    resumes = bool(path) and os.path.isfile(path)
    path = path if resumes else getattr(flags, "finetune_from_model", None)
    if not (given and resumes or recurrent) or not path or not os.path.isfile(path):
        return
    try:
        old = model_flags(load_checkpoint(path))
    except Exception:  # fairseq loads it next and reports the problem
        return
    if recurrent and getattr(flags, "lstm_attn_residual", None) is None and has_old_query(old):
        flags.lstm_attn_residual = False
        logger.info(f"{path}: the query of its attention to the source has no residual connection, so nor has this one")
    if given and resumes:
        _keep_inits(flags, given, path, old)


def _keep_inits(flags: argparse.Namespace, given: list[str], path: str, old: dict[str, Any]) -> None:
    """Replace ``--deep-init`` when a run is resumed: the checkpoint records the initialisation of its weights."""
    for name, default in _init_options().items():
        setattr(flags, name, old.get(name) if old.get(name) is not None else default)
    used = ", ".join(f"{name.replace('_', ' ')} {getattr(flags, name)}" for name in INIT_FLAGS if getattr(flags, name))
    logger.info(f"training resumes from {path}: {' and '.join(given)} not used; its weights began with {used}")
