"""What a training run records about depth: each layer's share of the gradient, and what its aggregators hold."""

import math
from typing import Dict, List

import torch
from torch import Tensor, nn

from ..aggregators.lstm import DepthwiseLstm
from .parts import part_parameters, tensor_norms
from .weights import WeightMatrix, dlcl_weights

SIDES = {"enc": "encoder", "dec": "decoder"}
GATES = ("input", "forget", "output")


@torch.no_grad()
def depth_record(model: nn.Module) -> Dict[str, float]:
    """Shares of the gradient norm and summaries of the aggregators, after a backward pass.

    A share is the L2 norm over the gradients of a part's parameters, divided by that over all of the model's: what
    multiplies every gradient (loss scale, number of tokens, clipping) cancels. One transfer brings all from a GPU.

    Args:
        model: a model of this package

    Returns:
        - "enc_1" ..., "dec_1" ..., "embed": shares of the layers and of the embeddings; "ratio_enc", "ratio_dec": that
          of the first layer over that of the last. They are left out where a gradient is not finite (fairseq skips
          that update, too) and where none is left.
        - "dlcl_enc_newest" ...: see :meth:`WeightMatrix.bands`
        - "lstm_enc_input_gate", "..._forget_gate", "..._output_gate": L2 norm over a gate's matrices of the stack
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    matrices = dlcl_weights(model)
    gates = _gate_matrices(model)
    vectors = [tensor_norms([p.grad for p in parameters])] if parameters else []
    vectors += [matrix.values.flatten() for matrix in matrices.values()]
    vectors += [tensor_norms(weights) for weights in gates.values()]
    if not vectors:
        return {}
    values = torch.cat([vector.to(vectors[0].device) for vector in vectors]).cpu()
    pieces = iter(values.split([len(vector) for vector in vectors]))

    norms = dict(zip(map(id, parameters), next(pieces).tolist())) if parameters else {}
    record = _shares(model, norms)
    for side, matrix in matrices.items():
        matrix = WeightMatrix(next(pieces).view(matrix.values.shape), matrix.per_entry)
        record.update({f"dlcl_{side[:3]}_{band}": mean for band, mean in matrix.bands().items()})
    for name in gates:
        record[name] = math.hypot(*next(pieces).tolist())
    return record


def _gate_matrices(model: nn.Module) -> Dict[str, List[Tensor]]:
    found = {}
    for short, side in SIDES.items():
        history = getattr(model, side).history
        if isinstance(history, DepthwiseLstm) and history.has_gates:
            for index, gate in enumerate(GATES):
                found[f"lstm_{short}_{gate}_gate"] = [gates.weight.chunk(3)[index] for gates in history.gates]
    return found


def _shares(model: nn.Module, norms: Dict[int, float]) -> Dict[str, float]:
    total = math.hypot(*norms.values())
    if not total or not math.isfinite(total):
        return {}
    parts = {
        name: [math.hypot(*(norms.get(id(parameter), 0.0) for parameter in group)) / total for group in groups]
        for name, groups in part_parameters(model).items()
    }
    shares = {"embed": parts["embedding"][0]}
    for short, side in SIDES.items():
        layers = parts[side]
        shares.update({f"{short}_{number}": share for number, share in enumerate(layers, 1)})
        if layers and layers[-1]:
            shares[f"ratio_{short}"] = layers[0] / layers[-1]
    return shares
