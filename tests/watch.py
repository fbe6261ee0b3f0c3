"""What is looked at in the process of a training that was drawn at random (tests/draws.py)."""

import json
from pathlib import Path


def watch(report):
    """Called in the process of the training, before it: look at each gradient, and at the model that is saved."""
    import fairseq_cli.train as program
    from fairseq.trainer import Trainer

    train, clip, missing = program.main, Trainer.clip_grad_norm, set()

    def clip_grad_norm(trainer, *rest, **options):
        for name, parameter in trainer.get_model().named_parameters():
            if parameter.requires_grad and (parameter.grad is None or not parameter.grad.isfinite().all()):
                missing.add(name)
        return clip(trainer, *rest, **options)

    def main(cfg):
        train(cfg)
        Path(report).write_text(json.dumps({"missing": sorted(missing), "fault": fault_of_saved(cfg)}))

    Trainer.clip_grad_norm, program.main = clip_grad_norm, main


def fault_of_saved(cfg):
    """What does not hold for the model that was saved."""
    import torch
    from fairseq import checkpoint_utils

    from tests import invariances

    path = Path(cfg.checkpoint.save_dir) / "checkpoint_last.pt"
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    model.double()  # some methods, such as EM routing, amplify the rounding of fp32 a thousandfold
    for check in (
        invariances.incremental_decoding_equals_full_decoding,
        invariances.hypotheses_that_share_a_source_decode_as_alone,
        invariances.padding_and_batch_composition_change_nothing,
    ):
        torch.manual_seed(1)
        try:
            check(lambda: model, task.source_dictionary)
        except Exception as error:
            return f"{check.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""
