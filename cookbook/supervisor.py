"""Where jobs that were queued before the rooms look for their supervisor: pickles hold names."""

from __future__ import annotations

from cookbook.supervise.supervisor import Supervisor

__all__ = ["Supervisor"]
