"""The doctor: checks of the machine and its software, reported in the order of the imports."""

from cookbook.doctor import machine, software  # noqa: F401
