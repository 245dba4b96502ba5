"""The doctor; imports the modules with its checks in the order in which it reports them."""

from cookbook.doctor import machine, software  # noqa: F401
