"""What ``dynamicemb train`` is made of. Needs torchrec and rich."""

from __future__ import annotations

from dynamicemb.errors import missing_package

for _package in ("torchrec", "rich"):
    try:
        __import__(_package)
    except ModuleNotFoundError as error:
        raise missing_package("dynamicemb train", _package, "cli") from error
