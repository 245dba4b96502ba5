"""The verbs of `submit.py`, by what they do: show, launch, follow."""
