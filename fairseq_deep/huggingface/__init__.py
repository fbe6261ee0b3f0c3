"""Packaged models in transformers: ``AutoConfig``, ``AutoTokenizer`` and ``AutoModelForSeq2SeqLM`` load them.

Importing this module registers the classes below. A package contains no code, and the runtime's checks apply.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("fairseq_deep.huggingface requires transformers: pip install 'transformers>=5'") from error
if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"fairseq_deep.huggingface requires transformers 5 or later, not {transformers.__version__}: "
        "pip install 'transformers>=5'"
    )

from .configuration import FairseqDeepConfig
from .modeling import FairseqDeepForConditionalGeneration
from .tokenization import FairseqDeepTokenizer

__all__ = ["FairseqDeepConfig", "FairseqDeepForConditionalGeneration", "FairseqDeepTokenizer"]

transformers.AutoConfig.register(FairseqDeepConfig.model_type, FairseqDeepConfig, exist_ok=True)
transformers.AutoModelForSeq2SeqLM.register(FairseqDeepConfig, FairseqDeepForConditionalGeneration, exist_ok=True)
transformers.AutoTokenizer.register(FairseqDeepConfig, slow_tokenizer_class=FairseqDeepTokenizer, exist_ok=True)
