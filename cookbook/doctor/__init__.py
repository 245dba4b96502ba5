"""The doctor: its topics, in the order of its report; a check is a function of one of them."""

from cookbook.doctor import software, machine, slurm  # isort: skip  # noqa: F401
