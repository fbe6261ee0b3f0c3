#!/usr/bin/env bash
# One training of the comparison, from text to BLEU; run.sh calls it for each system and seed.
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe/compare "$here/${0##*/}" "$@"
