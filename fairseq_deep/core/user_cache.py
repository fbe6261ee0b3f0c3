"""Cache directory for files that are generated once per user."""

import os


def user_cache(name: str) -> str:
    """Return the directory *name* of the user's caches (XDG); it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "fairseq_deep", name)
