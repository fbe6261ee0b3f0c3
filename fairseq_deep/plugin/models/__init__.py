"""The fairseq model ``deep_transformer``: encoder, decoder, arguments."""
