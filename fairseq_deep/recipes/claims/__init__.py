"""Claims of the papers: systems and statements, with verdicts from our results."""
