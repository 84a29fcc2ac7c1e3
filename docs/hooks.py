"""What mkdocs does with a page beside its plugins: drawings become part of it.

A drawing of docs/pictures that a page shows as an image is put into the page, so that it follows
the page's colours, light or dark. (Elsewhere, as an image, it has its own.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PICTURES = Path(__file__).parent / "pictures"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*pictures/([a-z_]+\.svg)"[^>]*/?>')


def _drawing(image: re.Match[str]) -> str:
    alt, name = image.groups()
    svg = (_PICTURES / name).read_text()
    return svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)


def on_page_content(html: str, **_: Any) -> str:
    return _IMAGE.sub(_drawing, html)
