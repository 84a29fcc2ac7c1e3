"""A machine without the C++ extension: everything imports, and what needs it says so."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["dynamicemb._engine"] = None  # as if it were not there
import dynamicemb
from dynamicemb.errors import UsageError
options = dynamicemb.DynamicEmbTableOptions(dim=4, max_capacity=16)
try:
    dynamicemb.table.create_table(options, device="cpu")
except UsageError as error:
    assert "extension" in str(error) and "not built" in str(error), error
else:
    raise AssertionError("a table without an engine")
"""


def test_the_package_imports_and_a_cpu_table_names_what_is_missing() -> None:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
