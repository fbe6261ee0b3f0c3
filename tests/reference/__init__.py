"""Naive forms of the methods, each written from its equation as a plain loop: what the real code is compared with."""
