"""The MoE cookbook: recipes in, Slurm or local training jobs and their results out."""

__version__ = "0.1.0"
