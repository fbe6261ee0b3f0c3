"""The text of an experiment: fetched, rebuilt, checked, and cut into sub-words."""
