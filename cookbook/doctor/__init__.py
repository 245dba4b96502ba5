"""The doctor: its topics, in the order of its report; a check is a function of one of them."""

from cookbook.doctor import machine, software  # noqa: F401
