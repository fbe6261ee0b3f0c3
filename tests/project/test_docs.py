"""Links of the pages lead to files that exist; ``tests/run.sh --docs`` also checks anchors, equations and the site."""

import re

from tests.helpers.docs import PAGES
from tests.helpers.paths import ROOT


def test_links_lead_to_files():
    broken = []
    for page in PAGES:
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`(?!\])", "", (ROOT / page).read_text(encoding="utf-8"))
        targets = [it for it in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in it]
        broken += [f"{page}: {it}" for it in targets if not ((ROOT / page).parent / it).exists()]
    assert PAGES and broken == []
