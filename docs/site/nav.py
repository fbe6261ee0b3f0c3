"""A hook of mkdocs that adds the pages of methods to the navigation, by name; their headings are the titles."""

from pathlib import Path


def on_config(config):
    """Add the pages of docs/methods that the section "Methods" does not list."""
    section = next(entry["Methods"] for entry in config["nav"] if "Methods" in entry)
    listed = {page if isinstance(page, str) else next(iter(page.values())) for page in section}
    root = Path(config["docs_dir"])
    pages = sorted(path.relative_to(root).as_posix() for path in (root / "docs/methods").glob("*.md"))
    section += [page for page in pages if page not in listed]
    return config
