"""Flags of models from checkpoints, and from configurations of ``fairseq-hydra-train``.

fairseq groups some flags of its Transformer: ``model.encoder.layers`` is ``--encoder-layers``. Architecture functions
know flat names only, so the groups are flattened before an architecture fills in its presets.
"""

import argparse
import contextlib
import functools
from dataclasses import fields
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerConfig, TransformerModel, base_architecture
from omegaconf import OmegaConf, open_dict

from fairseq_deep.core.registry import UsageError, nearest

GROUPS = ("encoder", "decoder", "quant_noise")
PARTS = ("criterion", "optimizer", "lr_scheduler", "task")  # the parts of a run that have a name


def set_flag(args: Any, name: str, value: Any) -> None:
    """Set a flag of *args*, a namespace or a configuration, and so of the checkpoints."""
    with open_dict(args) if OmegaConf.is_config(args) else contextlib.nullcontext():
        setattr(args, name, value)


def take_flag(args: Any, name: str) -> Any:
    """Return a flag that applies to this command only, and unset it: checkpoints must not have it."""
    value = getattr(args, name, None)
    if value is not None:
        set_flag(args, name, None)
    return value


@functools.cache
def _filled() -> frozenset[str]:
    """Return the flags that every architecture sets."""
    flags = argparse.Namespace()
    base_architecture(flags)
    return frozenset(vars(flags))


def known_flags() -> dict[str, argparse.Action | None]:
    """Return all flags of a model, by flat name, with their actions on the command line (None: any value)."""
    parser = argparse.ArgumentParser(add_help=False)
    ARCH_MODEL_REGISTRY["deep_transformer"].add_args(parser)
    config = TransformerConfig()
    names = {f"{group}_{field.name}" for group in GROUPS for field in fields(getattr(config, group))}
    names |= {field.name for field in fields(config)} - {*GROUPS}
    return {**dict.fromkeys(names | _filled()), **{action.dest: action for action in parser._actions}}


def is_filled(config: Any) -> bool:
    """Return whether an architecture has already set the flags of *config*, a namespace or a configuration."""
    return _filled() <= set(vars(config) if isinstance(config, argparse.Namespace) else config)


def fill(flags: dict[str, Any], path: str, fix: str = "translate with fairseq-generate") -> argparse.Namespace:
    """Complete the *flags* of the model at *path* with its architecture; one of fairseq's becomes its twin.

    Raises:
        UsageError: the architecture is unknown, or neither from this package nor of fairseq's ``transformer``
    """
    arch = flags.get("arch") or flags.get("_name")
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is TransformerModel:
        arch = f"deep_{arch}"
    elif model is not ARCH_MODEL_REGISTRY["deep_transformer"]:
        raise UsageError(
            f"{path} has the architecture {arch}, which is neither of this package nor of fairseq's transformer; {fix}"
        )
    filled = argparse.Namespace(**{**flags, "arch": arch, "_name": arch})
    try:
        ARCH_CONFIG_REGISTRY[arch](filled)
    except Exception as error:  # invalid settings raise arbitrary exceptions in fairseq
        raise UsageError(f"{path} does not have the settings of {arch} ({error})") from error
    return filled


def flatten(config: Any) -> None:
    """Replace the groups of *config*, the part ``model`` of a configuration, by flat flags.

    Raises:
        UsageError: a key is unknown, is given twice, or has a value of the wrong type
    """
    known, flags = known_flags(), {}
    for key, value in OmegaConf.to_container(config, resolve=True).items():
        group = key in GROUPS and isinstance(value, dict)
        for name, each in value.items() if group else [(key, value)]:
            flag = f"{key}_{name}" if group else name
            path = f"model.{key}.{name}" if group else f"model.{key}"
            if flag not in (*known, "_name", "arch"):
                raise UsageError(f"{path}: unknown setting{_suggest(flag, group and key)}; see fairseq-train --help")
            if flag in flags:
                raise UsageError(f"{path}: it is also given as a flat or a nested key; omit one of them")
            flags[flag] = _check(path, each, known.get(flag))
    with open_dict(config):
        for group in GROUPS:
            config.pop(group, None)
        config.update(flags)


def _suggest(flag: str, group: Any) -> str:
    names = [name for name in known_flags() if "__" not in name and name.startswith(f"{group}_" if group else "")]
    text = nearest(flag, names)
    return text.replace(f"{group}_", f"{group}.", 1) if group else text


def _check(path: str, value: Any, action: argparse.Action | None) -> Any:
    """Return *value* as a command line would give it."""
    if path.endswith("layers_to_keep") and isinstance(value, list):
        return ",".join(map(str, value))
    if action is None or value is None:
        return value
    if action.nargs == 0:
        wanted, right = "true or false", value in (True, False)
    elif action.type in (int, float):
        kinds = (int,) if action.type is int else (int, float)
        wanted = "an integer" if action.type is int else "a number"
        right = isinstance(value, kinds) and not isinstance(value, bool)
    else:
        wanted = f"one of {', '.join(action.choices or ())}"
        right = not action.choices or value in action.choices
    if not right:
        raise UsageError(f"{path} must be {wanted} ({value!r}); correct the value")
    return value


def flags_of_run(config: Any) -> argparse.Namespace:
    """Return the flags of the whole run, as on a command line; *config* is the run's part ``model``."""
    run, flags = config._get_parent(), {}
    parts = OmegaConf.to_container(run, resolve=False) if OmegaConf.is_dict(run) else {}
    for name, part in parts.items():
        if isinstance(part, dict) and name != "model":
            flags.update({key: value for key, value in part.items() if not key.startswith("_")})
    for name in PARTS:
        part = parts.get(name)
        flags[name] = part.get("_name") if isinstance(part, dict) else part
    flags.update({key: value for key, value in OmegaConf.to_container(config).items() if key != "_name"})
    return argparse.Namespace(**flags)
