#!/usr/bin/env bash
# The documentation site, from the pages of the repository where they lie and the docstrings, into build/site; a broken
# link or anchor is an error. The tools are those of the group `docs` in pyproject.toml, in .venv/docs.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/tools.sh
. tests/tools.sh
ensure_tools docs

# mkdocs wants all pages in one folder, and not its own; pages link to programs, too
rm -rf build/pages
mkdir -p build/pages
# those that are not committed yet, too
git ls-files -z --cached --others --exclude-standard --deduplicate -- README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE CITATION.cff '*.txt' docs examples benchmarks third_party fairseq_deep |
  while IFS= read -r -d '' page; do
    [[ ! -f $page ]] || cp --parents -t build/pages "$page"
  done
# the page of a package that names no object has all modules, the contract first
for page in build/pages/docs/site/api/*.md; do
  ! grep -q '^:::' "$page" || continue
  for package in fairseq_deep/{core,plugin}/"$(basename "$page" .md)"; do
    [[ -d $package ]] || continue
    for module in $(cd "$package" && printf '%s\n' base.py [!_]*.py | awk '!seen[$0]++'); do
      [[ -f $package/$module ]] || continue
      printf '\n::: %s.%s\n' "${package//\//.}" "${module%.py}" >>"$page"
    done
  done
done
# the reference of all commands, from the text that the tests compare with the parser
awk -F' [|] ' 'BEGIN { print "# Reference of the commands" }
  /^  example: / { print "    " substr($0, 12) "\n"; next }
  /^fairseq-deep/ { split($0, of, ": "); print "\n## `" of[1] "`\n\n" substr($0, length(of[1]) + 3) "\n"; head = 1; next }
  NF > 4 { if (head) print "| option | choices | default | meaning |\n|---|---|---|---|"; head = 0
           gsub(/^ +/, "", $1); if ($4 == "False" || $4 == "[]") $4 = ""; print "| `" $1 "` | " $3 " | " $4 " | " $5 " |" }' \
  tests/snapshots/help.txt >build/pages/docs/tools/options.md
export NO_MKDOCS_2_WARNING=1
mkdocs build --strict --config-file docs/site/mkdocs.yml

# what must stop the build does so, shown by a site with one page
mkdir -p build/broken
cat >build/broken.yml <<'EOF'
site_name: broken
docs_dir: broken
hooks: [../docs/site/equations.py]
markdown_extensions:
  - pymdownx.arithmatex: {generic: true, inline_syntax: [dollar], block_syntax: [dollar]}
EOF
stops() {
  printf '# Broken\n\n%s\n' "$1" >build/broken/index.md
  if mkdocs build --strict --config-file build/broken.yml --site-dir broken_site >build/broken.log 2>&1 ||
    ! grep -q "$2" build/broken.log; then
    echo "the build accepts: $1"
    cat build/broken.log
    return 1
  fi
}
stops $'$$\n\\frac{a}\n$$' 'mfrac has 1 of 2 arguments'
# shellcheck disable=SC2016 # LaTeX
for broken in '\foo|unknown command' 'a & b|requires an environment' '\boldsymbol{x}|is not supported'; do
  stops "Let \$${broken%|*}\$ be." "${broken#*|}"
done
stops '[text](missing.md)' 'missing.md'
echo "build/site: $(find build/site -name index.html | wc -l) pages"
