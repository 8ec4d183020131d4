"""The mark of tests that run programs in the system's sandbox."""

from __future__ import annotations

import pytest

from shoal.records import ShoalError
from shoal.tasks.graders import sandbox

try:
    sandbox.require_sandbox()
    NO_SANDBOX = ""
except ShoalError as error:
    NO_SANDBOX = str(error)

sandboxed = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX)
"""A test with it is skipped where the system has no sandbox, and says why."""
