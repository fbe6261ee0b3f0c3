"""How many kernels a device would launch for a step of training and of decoding: changes are seen, and meant.

An operation of ATen that is no view and no question of the host counts as one kernel. Shapes are small, since counts
depend only on depth. Triton's kernels, which replace some of them on a GPU, do not run here.
"""

import pytest
import torch

from tests.helpers.device import AVAILABLE, AbsentCuda
from tests.helpers.methods import METHODS
from tests.helpers.models import PRENORM, make_batch
from tests.helpers.tensors import Kernels

pytestmark = pytest.mark.skipif(
    not AVAILABLE or torch.__version__.split("+")[0] != "2.13.0", reason="another torch has other operations"
)

CASES = {"prenorm": (PRENORM, {}), "dlcl": METHODS["layer_agg-dlcl"], "lstm": METHODS["layer_agg-lstm"],
         "merged": METHODS["decoder_attn-merged"], "average": METHODS["decoder_attn-average"]}  # fmt: skip
TRAINING = {"prenorm": 366, "dlcl": 424, "lstm": 428, "merged": 318, "average": 348}
DECODING = {"prenorm": 100, "dlcl": 116, "lstm": 113, "merged": 68, "average": 78}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_training(case, build, dictionary):
    """Forward, loss and backward."""
    name, flags = CASES[case]
    model = build(name, **flags).train().half().to("meta")
    source, lengths, target = (tensor.to("meta") for tensor in make_batch(dictionary))
    model.decoder.pads_right = True
    model(source, lengths, target)  # makes masks and positions
    with Kernels() as found:
        model(source, lengths, target)[0].float().square().mean().backward()
    assert len(found.names) == TRAINING[case], "if the change is meant, put the new count into TRAINING"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_step_of_decoding(case, build, dictionary):
    """The third step, after the hypotheses of a sentence have changed places."""
    name, flags = CASES[case]
    model, device, state = build(name, **flags).eval().half(), AbsentCuda(), {}
    source, lengths, target = make_batch(dictionary, target_lengths=(4,) * 6)
    twice, order = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1, 0, 2, 2, 4, 5])
    with device:
        device.take(model)
        source, lengths, target, twice, order = map(device.take, (source, lengths, target, twice, order))
        encoded = model.encoder.reorder_encoder_out(model.encoder(source, lengths), twice)
        for step in (1, 2):
            model.decoder(target[:, :step], encoder_out=encoded, incremental_state=state)
        with Kernels() as found:
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
            model.decoder(target[:, :3], encoder_out=encoded, incremental_state=state)
    assert len(found.names) == DECODING[case], "if the change is meant, put the new count into DECODING"
