"""``--admin-start profile`` through fairseq's own console scripts: the first training batch alone sets omega."""

import math

import pytest
import torch
from fairseq import utils

from tests.helpers.commands import EXACT, load_trained, losses, run, saved, train_command
from tests.helpers.models import POSTNORM as POST

PROFILE = ("--deep-init", "admin", "--admin-start", "profile")
FLAGS = (*EXACT, "--disable-validation")
RATE = 1.5e-3  # the highest learning rate of three updates; that of the first is 0, so that it profiles alone


def train(data, folder, *flags, **options):
    return run(*train_command(data, folder, *PROFILE, *FLAGS, *flags, arch=POST), **options)


def omegas(state):
    """Rows of omega of both stacks, from the bottom of the encoder to the top of the decoder."""
    names = [f"{side}.layers.{layer}.residual.weight" for side in ("encoder", "decoder") for layer in range(2)]
    return torch.cat([state[name] for name in names])


def saved_omegas(folder, name="checkpoint_last.pt"):
    return omegas(saved(folder, name)["model"])


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of 4 updates, with a checkpoint of each of the first three."""
    folder = tmp_path_factory.mktemp("admin")
    train(data, folder, "--max-update", "4", "--save-interval-updates", "1")
    return folder


def fresh(path):
    """The model in the checkpoint *path* as it was before its first update, and the first two training batches."""
    _, cfg, task, batches = load_trained(path)
    utils.set_torch_seed(cfg.common.seed)
    model = task.build_model(cfg.model)
    for cancel in model.waiting:
        cancel()
    return model.train(), batches[:2]


@torch.no_grad()
def profiled(model, samples):
    """omega of all connections, a pass for each: omega_{i+1}^2 = Var[omega_i x_i] + Var[F_i], a mean over *samples*."""
    found = []
    for stack in (model.encoder, model.decoder):
        variance = 1.0
        for layer in stack.layers:
            for index in range(len(layer.residual.weight)):
                layer.residual.weight[index] = math.sqrt(variance)
                found.append(math.sqrt(variance))
                seen = []
                handle = layer.residual.register_forward_pre_hook(
                    lambda module, inputs, index=index, seen=seen: seen.append(inputs) if inputs[2] == index else None
                )
                for sample in samples:
                    model(**sample["net_input"])
                handle.remove()
                variances = [float((found[-1] * x).var(unbiased=False) + f.var(unbiased=False)) for x, f, *_ in seen]
                assert len(variances) == len(samples)
                variance = sum(variances) / len(variances)
    return torch.tensor(found)


def check_profile(folder, count):
    """Whether the first update in *folder* profiled with *count* batches: all values of a connection are alike."""
    model, samples = fresh(folder / "checkpoint_1_1.pt")
    expected, actual = profiled(model, samples[:count]), saved_omegas(folder, "checkpoint_1_1.pt")
    assert len(expected) == 2 * 2 + 3 * 2
    assert expected[0] == expected[4] == 1.0 and min(expected[1:4].min(), expected[5:].min()) > 1.1
    torch.testing.assert_close(actual, expected.unsqueeze(1).expand_as(actual), rtol=1e-5, atol=0)


def test_the_first_update_profiles_and_later_ones_only_learn(trained):
    check_profile(trained, 1)
    first, third = (saved_omegas(trained, f"checkpoint_1_{update}.pt") for update in (1, 3))
    assert 0 < (first - third).abs().max() < 2 * RATE


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_processes_profile_with_the_mean_of_their_batches(data, tmp_path, backend):
    flags = ("--distributed-backend", "gloo", "--ddp-backend", backend, "--max-update", "3")
    assert len(losses(train(data, tmp_path, *flags, "--save-interval-updates", "1", processes=2))) == 3
    check_profile(tmp_path, 2)


@pytest.mark.parametrize("flags", [[], ["--memory-efficient-fp16"], ["--bf16"]], ids=str)
def test_another_run_starts_from_the_profiled_weights(data, trained, tmp_path, flags):
    """``--finetune-from-model`` of a checkpoint profiles nothing, also in half precision, whose start it is."""
    start = trained / "checkpoint_1_1.pt"
    assert len(losses(train(data, tmp_path, "--max-update", "3", *flags, "--finetune-from-model", start))) == 3
    moved = (saved_omegas(tmp_path).float() - saved_omegas(trained, start.name)).abs().max()
    assert 0 < moved < (0.02 if flags else 2 * RATE), "rounded and trained, but not profiled"
