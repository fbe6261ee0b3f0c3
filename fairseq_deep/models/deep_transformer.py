"""The model ``deep_transformer``: fairseq's Transformer on the axes of this package.

``--layer-agg`` says how layers are connected, ``--deep-init`` how weights start. Depth, width, norm placement and
everything else are fairseq's own flags. Named architectures (``architectures.py``) are presets of these flags, and a
flag beats a preset.
"""

import argparse
import logging
from typing import Dict, List, Optional

import torch
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from omegaconf import OmegaConf
from torch import Tensor

from ..aggregators import AGGREGATORS
from ..attention import DECODER_ATTENTIONS
from ..decoding import pack_linear
from ..inits import INITS
from ..inits.walk import initialise
from ..registry import UsageError
from .building import SIDES, build_init, init_name
from .checks import check_options
from .decoder import DeepTransformerDecoder
from .depth_log import log_depth
from .encoder import DeepTransformerEncoder

logger = logging.getLogger(__name__)


@register_model("deep_transformer")
class DeepTransformerModel(TransformerModel):
    """Transformer with a choice of connections between its layers.

    Attributes:
        encoder: :class:`DeepTransformerEncoder`
        decoder: :class:`DeepTransformerDecoder`
    """

    waiting = ()  # what takes back the preparations for a first training batch
    log_depth_interval = 0
    num_updates = 0

    @classmethod
    def add_args(cls, parser) -> None:
        """Add fairseq's Transformer flags and those of this package, without defaults."""
        super().add_args(parser)
        for registry, text in ((AGGREGATORS, "how the layers of {} are connected"), (INITS, "how {} starts")):
            for prefix, stack in (("", "both stacks"), ("encoder-", "the encoder"), ("decoder-", "the decoder")):
                flag = registry.kind.replace("--", f"--{prefix}")
                help = f"{text.format(stack)}: {', '.join(registry.names())}"
                parser.add_argument(flag, metavar="NAME", type=registry.check, help=help)
            for add_flags in {registry.get(name).add_args: None for name in registry.names()}:
                add_flags(parser)
        parser.add_argument("--decoder-attn", metavar="NAME", type=DECODER_ATTENTIONS.check,
                            help=f"attentions of the decoder: {', '.join(DECODER_ATTENTIONS.names())}")
        parser.add_argument("--average-ffn", action="store_true",
                            help="--decoder-attn average and merged-average: a feed-forward network on the mean")
        parser.add_argument("--log-depth-interval", type=int, metavar="N",
                            help="log gradient norms of all layers and aggregator weights at every N-th update")
        parser.add_argument("--relative-positions", type=int, metavar="K",
                            help="relative positions in self-attention (keys only), clipped at K; with lstm and rnn")

    @classmethod
    def build_model(cls, args, task):
        """Build the model; the contract is fairseq's.

        Raises:
            UsageError: flags that clash
        """
        if OmegaConf.is_config(args):  # from fairseq-hydra-train: fairseq would lose the flags that it does not know
            args = argparse.Namespace(**OmegaConf.to_container(args, resolve=True))
        check_args(args, task)
        model = super().build_model(args, task)
        model.encoder.history.tie(model.decoder.history)
        model.decoder.history.tie(model.encoder.history)
        cfg = TransformerConfig.from_namespace(args)
        inits = [build_init(cfg, side) for side in SIDES]
        pretrained = [side for side in SIDES if getattr(args, f"{side}_embed_path", None)]
        initialise(model, *inits, keep=[getattr(model, side).embed_tokens.weight for side in pretrained])
        model.waiting = [cancel for cancel in (init.prepare(getattr(model, init.side)) for init in inits) if cancel]
        for init in inits:
            if init.touches:
                logger.info(f"{init.side}: --deep-init {init_name(cfg, init.side)} {init}".strip())
        model.log_depth_interval = getattr(args, "log_depth_interval", None) or 0
        return model

    def prepare_for_inference_(self, cfg):
        """fairseq calls it before it generates."""
        super().prepare_for_inference_(cfg)
        pack_linear(self)

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def perform_slowmo(self, optimizer, fp32_params=None):
        """Log the depth, if it is time. fairseq calls a method of this name after each step, gradients in place."""
        if self.log_depth_interval and (self.num_updates + 1) % self.log_depth_interval == 0:
            log_depth(self)

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return DeepTransformerEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        cfg = TransformerConfig.from_namespace(args)
        return DeepTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def load_state_dict(
        self,
        state_dict: Dict[str, Tensor],
        strict: bool = True,
        model_cfg: Optional[object] = None,
        args: Optional[argparse.Namespace] = None,
    ):
        """Load a checkpoint of this package, of fairseq's ``transformer`` or of the original DLCL code.

        Raises:
            UsageError: the checkpoint is of another vocabulary or another architecture
        """
        if strict and not self._prunes(model_cfg):
            self.upgrade_state_dict(state_dict)
            same = {a for a, name in self._aliases().items() if _equal(state_dict.get(a), state_dict.get(name))}
            check_state_dict(self.state_dict(), {key: state_dict[key] for key in state_dict if key not in same})
        for cancel in self.waiting:
            cancel()
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for alias, name in self._aliases().items():  # torch asks for the second names, too
            if prefix + name in state_dict:
                state_dict[prefix + alias] = state_dict[prefix + name]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """The parameters by name; what the aggregators of both stacks share is there once, as the encoder's."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for alias in self._aliases():
            state.pop(prefix + alias, None)
        return state

    def _aliases(self) -> Dict[str, str]:
        """Names of parameters in the decoder's aggregator that are the encoder's, and their names there."""
        names = {id(p): f"encoder.history.{name}" for name, p in self.encoder.history.named_parameters()}
        own = self.decoder.history.named_parameters()
        return {f"decoder.history.{name}": names[id(p)] for name, p in own if id(p) in names}

    @staticmethod
    def _prunes(model_cfg) -> bool:
        """Whether fairseq will drop layers of the checkpoint (``--encoder-layers-to-keep``)."""
        sides = ("encoder_layers_to_keep", "decoder_layers_to_keep")
        return model_cfg is not None and any(getattr(model_cfg, name, None) for name in sides)


def _equal(first: Optional[Tensor], second: Optional[Tensor]) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def check_args(args, task) -> None:
    """Refuse flags that contradict each other or the data, each with one line."""
    check_options(args)
    interval = getattr(args, "log_depth_interval", None)
    if interval is not None and interval < 1:
        raise UsageError(f"--log-depth-interval {interval} logs nothing: use 1 or more, or leave it out")
    for side in ("encoder", "decoder"):
        dim, heads = getattr(args, f"{side}_embed_dim", None), getattr(args, f"{side}_attention_heads", None)
        if dim and heads and dim % heads:
            raise UsageError(
                f"--{side}-embed-dim {dim} is not divisible by --{side}-attention-heads {heads}: change one of them"
            )
    if getattr(args, "share_all_embeddings", False):
        if task.source_dictionary != task.target_dictionary:
            raise UsageError(
                "--share-all-embeddings needs one dictionary for both languages: "
                "binarise with fairseq-preprocess --joined-dictionary, or leave the flag out"
            )
        if getattr(args, "encoder_embed_dim", None) != getattr(args, "decoder_embed_dim", None):
            raise UsageError(
                "--share-all-embeddings needs equal widths: make --encoder-embed-dim and --decoder-embed-dim equal, "
                "or use --share-decoder-input-output-embed"
            )


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
    differences: List[str] = [f"it lacks {key}" for key in own if key not in loaded]
    differences += [f"it has {key}, which the model has not" for key in loaded if key not in own]
    differences += [
        f"{key} is {tuple(loaded[key].shape)}, in the model {tuple(own[key].shape)}"
        for key in own
        if key in loaded and own[key].shape != loaded[key].shape
    ]
    if differences:
        raise UsageError(
            f"the checkpoint is of another architecture ({differences[0]}; {len(differences)} differences): "
            "give the --arch and the flags that it was trained with, or another --save-dir"
        )
