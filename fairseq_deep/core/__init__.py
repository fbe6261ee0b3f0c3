"""Models and methods; this package only imports torch and numpy, not fairseq."""
