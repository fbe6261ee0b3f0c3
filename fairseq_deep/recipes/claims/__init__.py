"""Claims of the papers: their systems, and statements that are judged by what comes out."""
