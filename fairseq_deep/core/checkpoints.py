"""Parameter names in checkpoints of this package, of fairseq's ``transformer``, and of the original DLCL code.

Names of other checkpoints are converted before the comparison with the model: fused projections and numbered norms of
old fairseq versions, the unused copies in the encoder layers of fairseq 0.12.2, W and norms of the original DLCL code.
A checkpoint stores parameters that both stacks share once, under their name in the encoder.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from .aggregators.dlcl import Dlcl
from .positions import SinusoidalPositions
from .registry import UsageError

# the unused copies in the encoder layers of fairseq 0.12.2
_DUPLICATES = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
_NUMBERED_NORM = re.compile(r"((encoder|decoder)\.layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)")
_FUSED = re.compile(r"(.*\.(?:self|encoder)_attn)\.in_proj_(weight|bias)")
_DENSE = [f"{kind}, {torch.strided}" for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
_VERSION = torch.tensor([3.0])
_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def upgrade(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Convert the names of *state_dict*, of another code or version, in place."""
    upgrade_layers(state_dict)
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if isinstance(stack.aggregator, Dlcl):
            upgrade_dlcl(stack.aggregator, state_dict, f"{side}.history")
        if state_dict.get(f"{side}.version", _VERSION) <= 2 and f"{side}.layer_norm.weight" not in state_dict:
            stack.layer_norm = None  # early versions of fairseq do not have a norm after the layers
        state_dict[f"{side}.version"] = _VERSION
        if isinstance(stack.embed_positions, SinusoidalPositions):
            state_dict.pop(f"{side}.embed_positions.weights", None)
            state_dict[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    _upgrade_output(model.decoder, state_dict)


def _upgrade_output(decoder: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Convert the output projection, which old fairseq versions store under another name, or not at all if tied."""
    name = "decoder.output_projection.weight"
    if decoder.output_projection is None:  # adaptive softmax: fairseq adds one if embeddings are shared
        state_dict.pop(name, None)
    elif name not in state_dict:
        old = "decoder.embed_tokens.weight" if decoder.stack.tied_output else "decoder.embed_out"
        if old in state_dict:
            state_dict[name] = state_dict[old] if decoder.stack.tied_output else state_dict.pop(old)


def upgrade_layers(state_dict: dict[str, Tensor]) -> None:
    """Convert names in the layers of other fairseq versions, in place, and drop unused copies."""
    for key in list(state_dict):
        norm, fused = _NUMBERED_NORM.fullmatch(key), _FUSED.fullmatch(key)
        if norm and int(norm[3]) < len(_NORMS[norm[2]]):
            state_dict[f"{norm[1]}.{_NORMS[norm[2]][int(norm[3])]}.{norm[4]}"] = state_dict.pop(key)
        elif fused:
            for proj, value in zip(("q_proj", "k_proj", "v_proj"), state_dict.pop(key).chunk(3)):
                state_dict[f"{fused[1]}.{proj}.{fused[2]}"] = value
        elif _DUPLICATES.fullmatch(key):
            del state_dict[key]


def upgrade_dlcl(aggregator: Dlcl, state_dict: dict[str, Tensor], name: str) -> None:
    """Convert keys of the original DLCL code, in place: W with a third dimension of 1, norms numbered from 1."""
    weight = state_dict.get(f"{name}.weight")
    if weight is not None and weight.dim() == 3 and aggregator.groups == 1 and weight.size(2) == 1:
        state_dict[f"{name}.weight"] = weight.squeeze(2)
    if f"{name}.layer_norms.{aggregator.num_layers}.weight" not in state_dict:
        return
    for index in range(aggregator.num_layers):
        for part in ("weight", "bias"):
            old = f"{name}.layer_norms.{index + 1}.{part}"
            if old in state_dict:
                state_dict[f"{name}.layer_norms.{index}.{part}"] = state_dict.pop(old)


def check_loadable(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Reject *state_dict*, after :func:`upgrade`, if its names or shapes differ from *model*.

    Raises:
        UsageError: a name or a shape differs, or tensors differ that the model shares
    """
    same = {a for a, name in model.aliases().items() if _equal(state_dict.get(a), state_dict.get(name))}
    own = model.state_dict()
    check_state_dict(own, {key: state_dict[key] for key in state_dict if key not in same})
    separate = find_separate(own, state_dict)
    if separate:
        raise UsageError(
            f"the checkpoint's {' and '.join(separate)} differ, and the model shares them: omit --share-..., or give "
            "the flags that it was trained with"
        )


def find_separate(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that *own*, the state of a model, shares, and that differ in *loaded*."""
    first: dict[int, str] = {}
    for name in own:
        if name in loaded and own[name].numel():  # empty tensors have the same address
            same = first.setdefault(own[name].data_ptr(), name)
            pair = loaded[same], loaded[name]
            if pair[0].data_ptr() != pair[1].data_ptr() and not torch.equal(*(each.nan_to_num() for each in pair)):
                return same, name
    return None


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def check_state_dict(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    """Reject *loaded* if its names, shapes or kinds of values differ from *own*.

    Raises:
        UsageError: a name, a shape or a kind of values differs
    """
    differences = odd_types(own, loaded)
    if differences:
        raise UsageError(f"the checkpoint has weights of an unsupported type ({differences[0]}; {len(differences)} "
                         "weights): save it in fp32, fp16 or bf16")  # fmt: skip
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
            f"the checkpoint has another architecture ({_placement(own, loaded) or differences[0]}; "
            f"{len(differences)} differences): give the --arch and the flags that it was trained with, "
            "or another --save-dir; --init-from takes the weights of a shallower model"
        )


def _placement(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> str:
    """Return a difference in norm placement: pre-norm stacks have a norm at the end, post-norm stacks do not."""
    for side in ("encoder", "decoder"):
        norm, layers = f"{side}.layer_norm.weight", f"{side}.layers.0.self_attn_layer_norm.weight"
        if layers in own and layers in loaded and (norm in own) != (norm in loaded):
            kinds = ["pre-norm" if norm in state else "post-norm" for state in (loaded, own)]
            return f"its {side} is {kinds[0]}, the model's {side} is {kinds[1]}"
    return ""


def odd_types(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """Return the weights in *loaded* whose values are not dense floats, as *own* has them."""
    weights = {key: loaded[key] for key in own if key in loaded and own[key].is_floating_point()}
    return [
        f"{key} has the type {_kind(value)}"
        for key, value in weights.items()
        if _kind(value) not in _DENSE and not key.endswith("version")
    ]


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{'meta' if value.is_meta else value.dtype}, {value.layout}"


def state_differences(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """Return the differences between *loaded* and *own*, the state of a model, in names, shapes and kinds of values."""
    differences = odd_types(own, loaded) + [f"it lacks {key}" for key in own if key not in loaded]
    differences += [f"it has {key}, which the model lacks" for key in loaded if key not in own]
    differences += [
        f"{key} is {tuple(loaded[key].shape)}, in the model {tuple(own[key].shape)}"
        for key in own
        if key in loaded and own[key].shape != loaded[key].shape
    ]
    return differences
