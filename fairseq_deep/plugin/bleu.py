"""sacreBLEU with the tokenizer of the target language; this module does not require fairseq."""

from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.language_codes import TOKENIZERS, short_code


def bleu_for(code: str, **settings: Any) -> Any:
    """Return sacreBLEU's BLEU with the tokenizer of the target language.

    Raises:
        UsageError: the tokenizer is in a package that is not installed
    """
    from sacrebleu.metrics import BLEU

    language = short_code(code)
    try:
        return BLEU(tokenize=TOKENIZERS.get(language), **settings)
    except (RuntimeError, ImportError) as error:
        raise UsageError(f"sacreBLEU requires a tokenizer for '{code}': pip install 'sacrebleu[{language}]'") from error
