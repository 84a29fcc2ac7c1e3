"""What mkdocs does with a page beside its plugins.

A drawing of docs/pictures that a page shows as an image is put into the page, so that it follows
the page's colours, light or dark. (Elsewhere, as an image, it has its own.) A bar in code in a
table is written with a backslash, for other readers of markdown; here it would be seen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PICTURES = Path(__file__).parent / "pictures"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*pictures/([a-z_]+\.svg)"[^>]*/?>')
_CODE = re.compile(r"<code>[^<]*</code>")


def _drawing(image: re.Match[str]) -> str:
    alt, name = image.groups()
    svg = (_PICTURES / name).read_text()
    named = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)
    return f'<span class="drawing-frame">{named}</span>'  # which scrolls on a phone


def on_page_content(html: str, **_: Any) -> str:
    html = _CODE.sub(lambda code: code[0].replace("\\|", "|"), html)
    return _IMAGE.sub(_drawing, html)
