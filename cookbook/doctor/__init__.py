"""The doctor: imports the modules of its checks in the order of its report."""

from cookbook.doctor import machine, software  # noqa: F401
