"""What the tests of caches for beams have in common."""

import pytest
import torch

C, H, KDIM, S = 8, 2, 6, 5
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # in steps, softmax is of fp32
with_and_without_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


def reorder(encoder, out, order):
    return encoder.reorder_encoder_out(out, torch.tensor(order))
