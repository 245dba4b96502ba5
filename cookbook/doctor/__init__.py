"""The doctor: checks of the machine and its software, which these imports register."""

from cookbook.doctor import machine, software  # noqa: F401
