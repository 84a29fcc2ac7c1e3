"""Where the header of native plug-ins is."""

from __future__ import annotations

from pathlib import Path

import dynamicemb


def include_dir() -> str:
    """The folder for the compiler's ``-I``, so that ``#include <dynamicemb/tde_io.h>`` works."""
    package = Path(dynamicemb.__file__).parent
    for folder in (package / "include", package.parent.parent / "include"):  # a wheel, a checkout
        if (folder / "dynamicemb" / "tde_io.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"tde_io.h is neither beside {package} nor in the checkout")
