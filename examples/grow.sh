#!/usr/bin/env bash
# Shallow-to-deep training: one training for each encoder depth, which starts with the layers of the one before it.
#
#   examples/grow.sh DATA FOLDER 6,12,24 UPDATES WARMUP [flags of fairseq-train]
#
# Each depth has an equal share of UPDATES and its own FOLDER/DEPTH. Run the same command again after an interruption:
# finished depths are skipped, and the one that was interrupted resumes from its checkpoint. From the second depth on,
# each layer is repeated (--init-from-order interleave; ORDER=block repeats whole stacks), and the learning rate begins
# at its peak. LAST has flags of the last depth only, such as LAST='--lr-scheduler inverse_sqrt_cooldown'.
set -euo pipefail

fail() { echo "${0##*/}: $1" >&2; exit 2; }

[[ $# -ge 5 ]] || fail "usage: ${0##*/} DATA FOLDER DEPTHS UPDATES WARMUP [flags of fairseq-train]"
data=$1 folder=$2 depths=$3 updates=$4 warmup=$5
shift 5
[[ $depths =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || fail "DEPTHS must be whole numbers with commas, not '$depths'"
[[ $updates =~ ^[1-9][0-9]*$ && $warmup =~ ^[1-9][0-9]*$ ]] || fail "UPDATES and WARMUP must be whole numbers from 1 on"
IFS=, read -ra list <<<"$depths"
read -ra last <<<"${LAST-}"
share=$((updates / ${#list[@]})) start=0 before=0 grow=()
((share)) || fail "UPDATES $updates must be at least one for each of ${#list[@]} depths"
((warmup < share)) || fail "WARMUP $warmup must be less than the $share updates of a depth"
for depth in "${list[@]}"; do
    ((depth > before)) || fail "DEPTHS must increase, not '$depths'"
    before=$depth
done
for flag in --stop-time-hours --stop-min-lr --max-epoch --patience; do
    [[ " $* ${LAST-}" != *" $flag"* ]] || fail "omit $flag: a depth that it ended would count as done"
done
order=${ORDER:-interleave}
[[ $order == interleave || $order == block ]] || fail "ORDER must be interleave or block, not '$order'"
mkdir -p "$folder"
if command -v flock >/dev/null; then # the training inherits the lock
    exec 9>"$folder/.lock"
    flock -w 10 9 || fail "$folder is in use by another ${0##*/}: try again later, or give another FOLDER"
fi
package=$(fairseq-deep path)
for depth in "${list[@]}"; do
    save=$folder/$depth
    command=(fairseq-train "$data" --user-dir "$package" "$@" --encoder-layers "$depth" --save-dir "$save"
        --warmup-updates "$warmup" --max-update $((start + share)) ${grow[@]+"${grow[@]}"})
    [[ $depth != "$before" ]] || command+=(${last[@]+"${last[@]}"})
    line=$(printf '%q ' "${command[@]}")
    mkdir -p "$save"
    if [[ -e $save/command.txt && $(cat "$save/command.txt") != "$line" ]]; then
        fail "$save was trained with another command ($save/command.txt): give the same, or another FOLDER"
    fi
    printf '%s\n' "$line" >"$save/command.new"
    mv "$save/command.new" "$save/command.txt"
    if [[ ! -e $save/done ]]; then
        echo "$depth layers: $share updates"
        "${command[@]}"
        touch "$save/done"
    fi
    grow=(--init-from "$save/checkpoint_last.pt" --init-from-order "$order"
        --stack-restart-updates "$warmup")
    start=$warmup
done
