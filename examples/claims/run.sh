#!/usr/bin/env bash
# A claim of one of the four papers: its systems trained under equal conditions, one table, one picture, and what holds.
# The same command again does only what is missing.
#
#   examples/claims/run.sh --data DIR depth
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" claims "$here/${0##*/}" "$@"
