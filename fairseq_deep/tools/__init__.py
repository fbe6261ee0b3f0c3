"""The sub-commands of ``fairseq-deep``, one module each, and the modules that they share."""
