#!/usr/bin/env bash
# Any list of architectures on the same text, updates and seeds: one table and one picture. The same command again does
# only what is missing.
#
#   examples/compare/run.sh --data DIR --seeds 3 --jobs 2 prenorm_6l dlcl_6l 'fixed=dlcl_6l --dlcl-fixed'
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" compare "$@"
