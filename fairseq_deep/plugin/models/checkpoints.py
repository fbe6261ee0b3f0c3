"""Names of parameters in checkpoints: of this package, of fairseq's ``transformer``, of the original DLCL code.

Checkpoints of other origin are renamed before they are compared with the model: fused projections and numbered norms of
old fairseq versions, the unused copies in the encoder layers of fairseq 0.12.2, W and norms of the original DLCL code.
What both stacks share is in a checkpoint once, under its name in the encoder.
"""

import re
from typing import Dict, List, Optional

import torch
from torch import Tensor, nn

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.registry import UsageError

# the unused copies in the encoder layers of fairseq 0.12.2
_DUPLICATES = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
_NUMBERED_NORM = re.compile(r"(encoder\.layers\.\d+)\.layer_norms\.([01])\.(weight|bias)")
_FUSED = re.compile(r"(.*\.(?:self|encoder)_attn)\.in_proj_(weight|bias)")
_NORMS = {"0": "self_attn_layer_norm", "1": "final_layer_norm"}


def upgrade(model: nn.Module, state_dict: Dict[str, Tensor]) -> None:
    """Rename in place what *state_dict*, of another origin, calls differently."""
    upgrade_layers(state_dict)
    for side in ("encoder", "decoder"):
        history = getattr(model, side).history
        if isinstance(history, Dlcl):
            upgrade_dlcl(history, state_dict, f"{side}.history")


def upgrade_layers(state_dict: Dict[str, Tensor]) -> None:
    """Rename in place what other versions of fairseq call differently in layers, and drop unused copies."""
    for key in list(state_dict):
        norm, fused = _NUMBERED_NORM.fullmatch(key), _FUSED.fullmatch(key)
        if norm:
            state_dict[f"{norm[1]}.{_NORMS[norm[2]]}.{norm[3]}"] = state_dict.pop(key)
        elif fused:
            for proj, value in zip(("q_proj", "k_proj", "v_proj"), state_dict.pop(key).chunk(3)):
                state_dict[f"{fused[1]}.{proj}.{fused[2]}"] = value
        elif _DUPLICATES.fullmatch(key):
            del state_dict[key]


def keep_final_norm(state_dict: Dict[str, Tensor], name: str) -> None:
    """Stop fairseq from dropping the stack's final norm because of an old ``version`` number.

    fairseq takes an early version for a model without that norm; the original DLCL code wrote early versions and
    had it. Whether the checkpoint holds the norm is what decides.
    """
    if f"{name}.layer_norm.weight" in state_dict:
        state_dict[f"{name}.version"] = torch.tensor([3.0])


def upgrade_dlcl(history: Dlcl, state_dict: Dict[str, Tensor], name: str) -> None:
    """The keys of the original DLCL code: W with a third dimension of 1, norms numbered from 1."""
    weight = state_dict.get(f"{name}.weight")
    if weight is not None and weight.dim() == 3 and history.groups == 1 and weight.size(2) == 1:
        state_dict[f"{name}.weight"] = weight.squeeze(2)
    if f"{name}.layer_norms.{history.num_layers}.weight" not in state_dict:
        return
    for index in range(history.num_layers):
        for part in ("weight", "bias"):
            old = f"{name}.layer_norms.{index + 1}.{part}"
            if old in state_dict:
                state_dict[f"{name}.layer_norms.{index}.{part}"] = state_dict.pop(old)


def aliases(model: nn.Module) -> Dict[str, str]:
    """Names of parameters in the decoder's aggregator that are the encoder's, and their names there."""
    names = {id(p): f"encoder.history.{name}" for name, p in model.encoder.history.named_parameters()}
    own = model.decoder.history.named_parameters()
    return {f"decoder.history.{name}": names[id(p)] for name, p in own if id(p) in names}


def check_loadable(model: nn.Module, state_dict: Dict[str, Tensor]) -> None:
    """Refuse *state_dict*, renamed by :func:`upgrade`, if its names or shapes are not those of *model*.

    Raises:
        UsageError: one of them differs
    """
    same = {a for a, name in aliases(model).items() if _equal(state_dict.get(a), state_dict.get(name))}
    check_state_dict(model.state_dict(), {key: state_dict[key] for key in state_dict if key not in same})


def _equal(first: Optional[Tensor], second: Optional[Tensor]) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def check_state_dict(own: Dict[str, Tensor], loaded: Dict[str, Tensor]) -> None:
    """Refuse *loaded* if its names or shapes are not those of *own*."""
    for key in own:
        if key.endswith("embed_tokens.weight") and key in loaded and own[key].shape != loaded[key].shape:
            (rows, dim), (loaded_rows, loaded_dim) = own[key].shape, loaded[key].shape
            if dim == loaded_dim:
                raise UsageError(
                    f"the checkpoint has a vocabulary of {loaded_rows} entries for {key}, the data has {rows}: "
                    "use the dictionary that the model was trained with"
                )
    differences = state_differences(own, loaded)
    if differences:
        raise UsageError(
            f"the checkpoint is of another architecture ({_placement(own, loaded) or differences[0]}; "
            f"{len(differences)} differences): give the --arch and the flags that it was trained with, "
            "or another --save-dir; --init-from takes the weights of a shallower model"
        )


def _placement(own: Dict[str, Tensor], loaded: Dict[str, Tensor]) -> str:
    """How the placements of norms differ: a pre-norm stack has a norm at its end, a post-norm stack has none."""
    for side in ("encoder", "decoder"):
        norm, layers = f"{side}.layer_norm.weight", f"{side}.layers.0.self_attn_layer_norm.weight"
        if layers in own and layers in loaded and (norm in own) != (norm in loaded):
            kinds = ["pre-norm" if norm in state else "post-norm" for state in (loaded, own)]
            return f"its {side} is {kinds[0]}, that of the model {kinds[1]}"
    return ""


def state_differences(own: Dict[str, Tensor], loaded: Dict[str, Tensor]) -> List[str]:
    """In which names and shapes *loaded* differs from *own*, the state of a model."""
    differences = [f"it lacks {key}" for key in own if key not in loaded]
    differences += [f"it has {key}, which the model has not" for key in loaded if key not in own]
    differences += [
        f"{key} is {tuple(loaded[key].shape)}, in the model {tuple(own[key].shape)}"
        for key in own
        if key in loaded and own[key].shape != loaded[key].shape
    ]
    return differences
