"""Recipes: experiments from text to BLEU in resumable stages.

A configuration (:mod:`options`) is resolved to a plan (:mod:`plan`), which runs in stages (:mod:`stages`).
"""
