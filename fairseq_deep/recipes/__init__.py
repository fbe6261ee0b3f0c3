"""Recipes: experiments from text to BLEU in resumable stages.

An experiment is a configuration (:mod:`options`), which becomes a plan (:mod:`plan`) and runs in stages
(:mod:`stages`). The driver imports the standard library only, so it checks its input before anything is installed.
"""
