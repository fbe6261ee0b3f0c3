# shellcheck shell=bash
# `ensure_tools GROUP` makes .venv/GROUP with the tools of that dependency group of pyproject.toml, and puts it first in
# PATH. They stay out of .venv itself: their releases have nothing to do with those that models run on.
ensure_tools() {
  local venv=.venv/$1 python
  # shellcheck source=examples/common/env.sh
  . examples/common/env.sh
  python=$(env_find_python)
  if [[ ! -f $venv/.ready || pyproject.toml -nt $venv/.ready ]]; then
    echo "making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check -qq 'pip>=25.1'
    "$venv/bin/python" -m pip install --disable-pip-version-check -qq --group "$1" -c constraints.txt
    touch "$venv/.ready"
  fi
  PATH=$PWD/$venv/bin:$PATH
}
