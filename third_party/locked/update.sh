#!/usr/bin/env bash
# Make the lists of this folder anew: releases with the sha256 of each of their files, for Python 3.11 to 3.14 on all
# systems, of the versions that constraints.txt says. Needs uv.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")"

lock() {
  uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --constraint ../../constraints.txt --output-file "$1.txt" - >/dev/null
  grep -c == "$1.txt" | sed "s/^/$1.txt: releases: /"
}

# to build fairseq and what else comes as source
printf '%s\n' 'pip>=23.2' 'setuptools>=77' wheel 'cython>=3' numpy 'patch-ng>=1.17' | lock build
echo torch | lock torch
# what fairseq and fairseq_deep ask for
printf '%s\n' bitarray cffi cython hydra-core numpy omegaconf regex rich sacrebleu sacremoses safetensors scipy subword-nmt tensorboardX tqdm |
  lock run
