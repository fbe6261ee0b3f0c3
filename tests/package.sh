#!/usr/bin/env bash
# What is released: sdist and wheel are built and checked, and so are CITATION.cff and Dockerfile. The tools are those of
# the group `package` in pyproject.toml, in .venv/package; what is built stays in dist/.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/tools.sh
. tests/tools.sh
ensure_tools package

rm -rf dist build
pyproject-build >build.log || { cat build.log && exit 1; }
rm -rf build build.log
twine check --strict dist/*
python - <<'EOF'
"""The wheel is the package, all of it and nothing else; the sdist is the repository."""
import glob
import subprocess
import tarfile
import zipfile

known = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
names = zipfile.ZipFile(glob.glob("dist/*.whl")[0]).namelist()
inside = {name for name in names if ".dist-info/" not in name}
wanted = {name for name in known if name.startswith("fairseq_deep/")}
assert inside == wanted, f"wheel: {sorted(inside ^ wanted)}"
names = tarfile.open(glob.glob("dist/*.tar.gz")[0]).getnames()
inside = {name.partition("/")[2] for name in names}
missing = {name for name in known if not name.startswith(".")} - inside
assert not missing, f"sdist lacks {sorted(missing)}"
print(f"wheel: {len(wanted)} files of the package; sdist: the repository")
EOF
cffconvert --validate -i CITATION.cff
hadolint Dockerfile
echo "Dockerfile: no complaints"
