# shellcheck shell=bash disable=SC2154  # options and settings are shared between the sourced files
# The option parser of the recipes. `option NAME TYPE DEFAULT HELP` defines the variable NAME and with it the option --name;
# conf files (one option a line) hold options of the recipe and flags of fairseq-train, told apart by name.

declare -a option_names=() conf_names=() conf_flags=() extra_flags=() arguments=()
declare -A option_type=() option_help=() option_given=() conf_value=()

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# TYPE is subsets, str, int (from 0), count (from 1), num, bool, auto (int or "auto"), autocount or choices such as a|b. An empty HELP keeps it out of --help.
option() {
  option_names+=("$1")
  option_type[$1]=$2
  option_help[$1]=$4
  printf -v "$1" %s "$3"
}

flag_of() { printf -- '--%s' "${1//_/-}"; }

usage() {
  local name value
  printf 'usage: %s [options]%s [-- flags for fairseq-train]\n\noptions, with their present values:\n' \
    "${0##*/}" "${argument_name:+ $argument_name}"
  for name in "${option_names[@]}"; do
    value=${!name}
    [[ -z ${option_help[$name]} ]] || printf '  %-19s %s [%s]\n' "$(flag_of "$name")" "${option_help[$name]}" "${value:-none}"
  done
}

# A question that names the word most like the first one; nothing if none is like it or there is no python3.
did_you_mean() {
  local near
  near=$(python3 -I -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1))' "$@" 2>/dev/null) ||
    near=''
  printf %s "${near:+: did you mean $near?}"
}

check_value() {
  local flag=$1 type=$2 value=$3
  case $type in
    str) ;;
    int) [[ $value =~ ^(0|[1-9][0-9]*)$ ]] || die "$flag takes a whole number, not '$value'" ;;
    count) [[ $value =~ ^[1-9][0-9]*$ ]] || die "$flag takes a whole number from 1 on, not '$value'" ;;
    num) [[ $value =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "$flag takes a number, not '$value'" ;;
    bool) [[ $value == true || $value == false ]] || die "$flag takes true or false, not '$value'" ;;
    auto) [[ $value == auto || $value =~ ^(0|[1-9][0-9]*)$ ]] || die "$flag takes a whole number or auto, not '$value'" ;;
    subsets)
      [[ $value == none || $value =~ ^(valid,)?test(,test[1-9][0-9]*)*$ ]] ||
        die "$flag takes none, or test with valid before it and test1, test2 ... behind it, not '$value'"
      ;;
    autocount) [[ $value == auto || $value =~ ^[1-9][0-9]*$ ]] || die "$flag takes a number from 1 on, or auto, not '$value'" ;;
    *) [[ "|$type|" == *"|$value|"* && -n $value ]] || die "$flag takes ${type//|/, }, not '$value'" ;;
  esac
}

set_option() {
  check_value "$(flag_of "$1")" "${option_type[$1]}" "$2"
  printf -v "$1" %s "$2"
}

unknown_option() {
  local -a flags=()
  local name
  for name in "${option_names[@]}"; do flags+=("$(flag_of "$name")"); done
  die "unknown option '$1'$(did_you_mean "$1" "${flags[@]}")" \
    "(--help lists them; flags of fairseq-train go after a lone --)"
}

# Whether the bool option before the word $1 stands alone; where a script takes arguments, the word may be one.
stands_alone() {
  [[ -z $1 || $1 == -* ]] || [[ -n ${argument_name-} && $1 != true && $1 != false ]]
}

# parse_options ORIGIN ARG...: only options whose ORIGIN is "user" are protected from conf files. A script that takes
# arguments, too, says what they are in `argument_name`, and finds them in `arguments`.
parse_options() {
  local origin=$1 flag name value
  shift
  while (($#)); do
    flag=${1%%=*}
    [[ $1 == -- ]] && { extra_flags+=("${@:2}"); return; }
    [[ $1 == -h ]] && flag=--help
    [[ -z ${argument_name-} || -z $1 || $1 == -* ]] || { arguments+=("$1"); shift; continue; }
    [[ $flag == --* ]] || die "unexpected argument '$1': options start with --"
    name=${flag#--}
    name=${name//-/_}
    [[ -n ${option_type[$name]-} ]] || unknown_option "$flag"
    if [[ $1 == *=* ]]; then
      value=${1#*=}
    elif [[ ${option_type[$name]} == bool ]] && stands_alone "${2-}"; then
      value=true
    else
      (($# > 1)) && [[ $2 != --* ]] || die "$flag needs a value"
      value=$2
      shift
    fi
    shift
    set_option "$name" "$value"
    [[ $origin == user ]] && option_given[$name]=1
  done
  return 0
}

find_conf() {
  local name=$1 folder file
  local -a known=()
  for folder in ${conf_folder:+"$conf_folder"} "$examples/$task/conf" "$examples/demo"; do
    [[ -f $folder/$name.args ]] && { printf %s "$folder/$name.args"; return; }
    for file in "$folder"/*.args; do
      file=${file##*/}
      known+=("${file%.args}")
    done
  done
  [[ $name == */* && -f $name ]] && { printf %s "$name"; return; }
  file=$examples/${name%%/*}/conf/${name#*/}.args  # that of another example
  [[ $name == */* && -f $file ]] && { printf %s "$file"; return; }
  die "unknown --conf '$name'$(did_you_mean "$name" "${known[@]}") (known: ${known[*]}; or the path of a file)"
}

# load_conf NAME,NAME: a line is "--name value"; a --conf line includes another file at that place, first looked for
# beside the file that has the line.
load_conf() {
  local -a names
  local name file
  IFS=, read -r -a names <<<"$1"
  for name in "${names[@]}"; do
    file=$(find_conf "$name") || exit 2
    load_conf_file "$file"
  done
}

load_conf_file() {
  local line flag value name whole conf_folder=${1%/*}
  whole=$'\n'$(<"$1")$'\n'
  while IFS= read -r line || [[ -n $line ]]; do
    read -r flag value <<<"$line"
    [[ -z $flag || $flag == \#* ]] && continue
    [[ $flag == --* ]] || die "$1: '$line' is not an option: a line is '--name value'"
    name=${flag#--}
    name=${name//-/_}
    if [[ $name == conf ]]; then
      load_conf "$value"
    elif [[ -n ${option_type[$name]-} ]]; then
      [[ -n ${option_given[$name]-} ]] || set_option "$name" "${value:-true}"
    elif [[ $flag != --deep-init || -z ${option_given[arch]-} || $whole == *$'\n'"--arch $arch"$'\n'* ]]; then
      # the start that a job names is its architecture's, and no other's
      [[ -n ${conf_value[$flag]+set} ]] || conf_names+=("$flag")
      conf_value[$flag]=$value
    fi
  done <"$1"
}

# The flags of all conf files, each once, with the value that came last.
collect_conf_flags() {
  local flag
  for flag in "${conf_names[@]}"; do
    conf_flags+=("$flag")
    [[ -z ${conf_value[$flag]} ]] || conf_flags+=("${conf_value[$flag]}")
  done
}

# Flags that the recipe itself passes to fairseq-train may not be given a second time after the lone --.
check_extra_flags() {
  local word name managed=' save_dir user_dir log_format cpu fp16 bf16 amp distributed_world_size distributed_backend '
  for word in "${extra_flags[@]}"; do
    [[ $word == --* ]] || continue
    word=${word%%=*}
    name=${word#--}
    name=${name//-/_}
    [[ -z ${option_type[$name]-} ]] || die "$word is an option of this script: give it before the lone --"
    [[ $name != share_all_embeddings && $name != share_decoder_input_output_embed ]] ||
      die "$word is set by this script: see --embeddings"
    [[ $managed != *" $name "* ]] || die "$word is set by this script: see --exp, --precision, --ngpu and --nnodes"
  done
}
