"""The model ``deep_transformer``: fairseq's Transformer with the methods of this package.

``--layer-agg`` selects the connection of layers and ``--residual`` the connection of sub-layers. ``--encoder-attn`` and
``--decoder-attn`` select the attention, ``--decoder-memory`` the encoder states that the decoder attends to, and
``--deep-init`` the initialisation. Depth, width, norm placement and everything else are fairseq's own flags. Named
architectures (``architectures.py``) preset these flags; a flag overrides the architecture's default.
"""

import argparse
import copy
import logging
import os
import re
from dataclasses import replace

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_deep.core.alignment import add_args as add_alignment_args
from fairseq_deep.core.checkpoints import check_loadable, upgrade
from fairseq_deep.core.checks import check_sizes
from fairseq_deep.core.decoding import pack_linear
from fairseq_deep.core.description import SIDES, add_args, describe
from fairseq_deep.core.dropout import speed_up_dropout
from fairseq_deep.core.inits.walk import initialise
from fairseq_deep.core.stack import Stack
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.plugin.training import check_device, check_exact, keep_memory, mark_matrices, set_factors

from .compiling import compile_calls
from .depth_log import StreamWatch, log_depth, log_streams
from .dictionaries import remember
from .hydra import flags_of_run, take_flag
from .init_from import ORDERS, initialise_from
from .language_tags import count_languages
from .stacks import DeepTransformerDecoder, DeepTransformerEncoder

logger = logging.getLogger(__name__)


def add_own_args(parser) -> None:
    """Add the flags of this package, without defaults."""
    add_args(parser)
    add_alignment_args(parser)
    parser.add_argument("--log-depth-interval", type=int, metavar="N",
                        help="log gradients of all layers, streams and aggregator weights every N updates")
    parser.add_argument("--compile", action="store_true",
                        help="compile layers and aggregators for training (torch.compile, torch 2.5 or newer)")
    parser.add_argument("--init-from", metavar="FILE",
                        help="initialise a new model from a checkpoint of a model of equal or smaller depth")
    parser.add_argument("--init-from-order", choices=ORDERS,
                        help="--init-from: repeat whole stacks (1 2 1 2) or each layer (1 1 2 2) (default: block)")
    parser.add_argument("--stack-restart-updates", type=int, metavar="N",
                        help="--init-from: first update number of the new run, to skip the warm-up of its schedule")
    parser.add_argument("--fast-dropout", action="store_true",
                        help="draw dropout masks on a CPU in a third of the time; masks differ for the same seed")
    parser.add_argument("--allow-other-dictionary", action="store_true",
                        help="accept a checkpoint with another dictionary of equal size, or of the opposite direction")


@register_model("deep_transformer")
class DeepTransformerModel(Transformer, TransformerModel):
    """Transformer with configurable connections between its layers.

    Attributes:
        encoder: :class:`DeepTransformerEncoder`
        decoder: :class:`DeepTransformerDecoder`
    """

    waiting = ()  # callables that remove the hooks for the first training batch
    log_depth_interval = 0
    num_updates = 0
    steps = False  # whether train() was called; nn.Module.training is also true for a new model
    watch = None  # StreamWatch of an update that is logged
    begins = True  # whether the first training step is still to come
    fast_dropout = False  # --fast-dropout
    compiles = False  # --compile, until the first training step
    compiler = None

    def __init__(self, cfg, encoder, decoder):
        TransformerModel.__init__(self, cfg, encoder, decoder)
        self.tie()

    @classmethod
    def add_args(cls, parser) -> None:
        """Add the flags of fairseq's Transformer and of this package, without defaults."""
        super().add_args(parser)
        for action in parser._actions:
            if action.dest == "decoder_output_dim":  # fairseq does not convert it, and fails in the first linear map
                action.type = int
        add_own_args(parser)

    @classmethod
    def build_model(cls, args, task):
        """Build the model; the contract is fairseq's.

        Raises:
            UsageError: flags conflict
        """
        source, allow_other = take_flag(args, "init_from"), bool(take_flag(args, "allow_other_dictionary"))
        tags = count_languages(args, task.source_dictionary)
        run = flags_of_run(args) if OmegaConf.is_config(args) else args
        if OmegaConf.is_config(args):  # from fairseq-hydra-train: fairseq would drop flags that it does not know
            args = OmegaConf.to_container(args, resolve=True)
        # a copy: values derived from the flags must not be saved as flags
        args = argparse.Namespace(**(args if isinstance(args, dict) else vars(args)))
        check_sizes(args, task)
        remember(task, allow_other)
        stacks = describe(args)
        settings = getattr(task, "cfg", None) or getattr(task, "args", None)
        stacks["decoder"] = replace(
            stacks["decoder"],
            pads_right=getattr(settings, "left_pad_target", None) is False,
            aligns=bool(getattr(settings, "load_alignments", None)),
        )
        model = cls._build(stacks, task, TransformerConfig.from_namespace(args))
        check_exact(run, model)
        model._initialise(args)
        if source is not None:
            order = getattr(args, "init_from_order", None) or ORDERS[0]
            initialise_from(model, source, stacks, task, allow_other, order)
        if tags:
            model.encoder.language_index.set_tags(tags)
        model.log_depth_interval = getattr(args, "log_depth_interval", None) or 0
        model.compiles = bool(getattr(args, "compile", None))
        model.fast_dropout = bool(getattr(args, "fast_dropout", None))
        model.full_context_alignment = bool(getattr(args, "full_context_alignment", None))
        return model

    @classmethod
    def from_pretrained(cls, model_name_or_path, checkpoint_file="model.pt", data_name_or_path=".", **kwargs):
        """Load a model for fairseq's hub; a recipe's directory has its dictionaries in ``data-bin``."""
        if data_name_or_path == "." and os.path.isdir(os.path.join(model_name_or_path, "data-bin")):
            data_name_or_path = "./data-bin"
        from fairseq_deep.plugin.hub import HubInterface

        found = super().from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)
        found.__class__ = HubInterface  # a second one would prepare the models again
        return found

    @classmethod
    def _build(cls, stacks: dict[str, Stack], task, cfg: TransformerConfig):
        """Build the model of *stacks*, untrained."""
        dictionaries = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
        tables = {}
        for side, dictionary in dictionaries.items():
            if side == "decoder" and cfg.share_all_embeddings:
                tables[side] = tables["encoder"]
            else:
                tables[side] = cls.build_embedding(cfg, dictionary, stacks[side].dim, getattr(cfg, side).embed_path)
        encoder, decoder = (
            kind(stacks, dictionaries[side], tables[side], cfg)
            for side, kind in (("encoder", DeepTransformerEncoder), ("decoder", DeepTransformerDecoder))
        )
        return cls(cfg, encoder, decoder)

    def _initialise(self, args) -> None:
        """Initialise the weights with the initialisations of both stacks."""
        stacks = [getattr(self, side) for side in SIDES]
        pretrained = [side for side in SIDES if getattr(args, f"{side}_embed_path", None)]
        keep = [getattr(self, side).embed_tokens.weight for side in pretrained]
        initialise(self, *(stack.init for stack in stacks), keep=keep)
        set_factors(self)
        mark_matrices(self)
        self.waiting = [cancel for cancel in (stack.init.prepare(stack) for stack in stacks) if cancel]
        for stack in stacks:
            if stack.init.touches:
                text = f"{stack.stack.side}: --deep-init {stack.stack.init.name} {stack.init}"
                logger.info(text.strip())

    def prepare_for_inference_(self, cfg):
        """Pack linear layers; fairseq calls this method before it generates."""
        super().prepare_for_inference_(cfg)
        pack_linear(self)

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        check_device(next(self.parameters()))
        return self

    def train(self, mode=True):
        self.steps = mode
        return super().train(mode)

    def set_num_updates(self, num_updates):
        """Store the update number and begin a training step.

        fairseq calls this method after ``train()`` at the beginning of each training step, and when it loads a
        checkpoint.
        """
        super().set_num_updates(num_updates)
        self.num_updates = num_updates
        if self.steps:
            self._begin_step()

    def _begin_step(self) -> None:
        if self.begins and next(self.parameters()).device.type == "cpu":
            keep_memory()
            if self.fast_dropout:
                speed_up_dropout(self)
        self.begins = False
        if self.watch is None and self._is_logged():
            self.watch = StreamWatch(self)
        # Admin's hooks for the first batch must run uncompiled
        hooked = self.waiting and any(part._forward_pre_hooks for part in self.modules())
        if self.compiles and not hooked:
            self.compiles = False
            stacks = [getattr(self, side) for side in SIDES]
            layers = [layer for stack in stacks for layer in stack.layers]
            self.compiler = compile_calls(layers + [part for stack in stacks for part in stack.aggregator.compiled()])

    def perform_slowmo(self, optimizer, fp32_params=None):
        """Log the depth record if it is due; fairseq calls this method after each step, with gradients in place."""
        if self.compiler is not None:
            self.compiler.report()
        if self._is_logged():
            log_depth(self)
        if self.watch is not None:
            log_streams(self.watch)
            self.watch = None

    def _is_logged(self) -> bool:
        """Return whether the depth record of the current update is logged."""
        return bool(self.log_depth_interval) and (self.num_updates + 1) % self.log_depth_interval == 0

    def load_state_dict(
        self,
        state_dict: dict[str, Tensor],
        strict: bool = True,
        model_cfg: object | None = None,
        args: argparse.Namespace | None = None,
    ):
        """Load a checkpoint of this package, of fairseq's ``transformer`` or of the original DLCL code.

        Raises:
            UsageError: the checkpoint has another vocabulary or another architecture
        """
        if strict and not self._prunes(model_cfg):
            self.upgrade_state_dict(state_dict)
            check_loadable(self, state_dict)
        for cancel in self.waiting:
            cancel()
        return super().load_state_dict(state_dict, strict, self._both_sides(model_cfg, state_dict), args)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Rename the keys of other versions; fairseq calls this method before it loads a checkpoint."""
        upgrade(self, state_dict)
        super().upgrade_state_dict_named(state_dict, name)

    @staticmethod
    def _prunes(model_cfg) -> bool:
        """Return whether fairseq will drop layers of the checkpoint (``--encoder-layers-to-keep``)."""
        sides = ("encoder_layers_to_keep", "decoder_layers_to_keep")
        return model_cfg is not None and any(getattr(model_cfg, name, None) for name in sides)

    def _both_sides(self, model_cfg, state_dict: dict[str, Tensor]):
        """Return *model_cfg* with all layers listed for a side without a list; fairseq would drop this side."""
        if not self._prunes(model_cfg):
            return model_cfg
        model_cfg = copy.copy(model_cfg)
        for side in ("encoder", "decoder"):
            if not getattr(model_cfg, f"{side}_layers_to_keep", None):
                found = (re.match(rf"{side}\.layers\.(\d+)\.", key) for key in state_dict)
                numbers = sorted({int(match[1]) for match in found if match})
                setattr(model_cfg, f"{side}_layers_to_keep", ",".join(map(str, numbers)))
        return model_cfg
