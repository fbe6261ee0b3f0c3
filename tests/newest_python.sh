#!/usr/bin/env bash
# Runs tests/run.sh on the newest Python, in a root file system of Debian unstable that it makes in DIR: of HEAD, with
# releases as pip finds them. Needs root, debootstrap and 12 GB; a second run downloads nothing. Arguments after DIR go
# to tests/run.sh.
#   tests/newest_python.sh /var/tmp/sid -q tests/core
#   PYTHON=python3.15 tests/newest_python.sh /var/tmp/sid
set -euo pipefail
unset CDPATH
(($# > 0)) && [[ $1 != -* ]] || { echo "usage: tests/newest_python.sh DIR [argument of tests/run.sh ...]" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3.14}
if [[ ! -x $dir/usr/bin/$python || ! -x $dir/usr/bin/pgrep ]]; then
  debootstrap --variant=minbase --include="$python,$python-venv,$python-dev,build-essential,git,ca-certificates,procps" \
    sid "$dir"
fi
# how pip and git reach the network here, and torchrun this machine
for file in /etc/hosts /etc/resolv.conf /etc/pip.conf "${PIP_CERT-}" "${SSL_CERT_FILE-}"; do
  [[ ! -f $file ]] || install -D "$(realpath "$file")" "$dir$file"
done
clone=$dir/root/fairseq_deep
git init -q "$clone"
git -C "$clone" fetch -q "$PWD" HEAD
git -C "$clone" checkout -q --force --detach FETCH_HEAD
# the mounts end with it
# shellcheck disable=SC2016  # expanded by the inner shell
exec unshare --mount bash -euc '
  mount -t proc proc "$0/proc"
  mount --rbind /dev "$0/dev"
  exec chroot "$0" env -C /root/fairseq_deep -u VIRTUAL_ENV -u PIP_FIND_LINKS PATH=/usr/local/bin:/usr/bin:/bin HOME=/root PYTHON="$1" \
    tests/run.sh "${@:2}"
' "$dir" "$python" "${@:2}"
