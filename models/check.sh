#!/usr/bin/env bash
# Checks models/wake.pml: every configuration must hold, and every protocol that is broken on
# purpose must be found out. Needs spin (6.5 or later) and gcc; one to two minutes on two cores.
#
#   models/check.sh          all but the three largest configurations
#   models/check.sh --all    those too (4 GB of memory, some minutes)
#   models/check.sh WORD     only the lines whose name contains WORD
#
# Exit code 1 if a configuration fails, or a broken protocol passes, or a search is incomplete.
set -u
here=$(cd "$(dirname "$0")" && pwd)
for tool in spin gcc; do
  command -v "$tool" > /dev/null || { echo "check.sh: $tool is not installed" >&2; exit 2; }
done

# verdict | name | flags of spin. holds, long, large: safety. notices: liveness under weak fairness.
configurations='
long    | 2 waiters, 2 writers, thread         | -DWAITERS=2 -DPROGRESS=1
long    | 3 waiters, one waits for ever        | -DWAITERS=3 -DFROM2=NEVER
long    | 2 waiters, one for ever, request     | -DWAITERS=2 -DPROGRESS=1 -DFROM1=NEVER -DSERVICE=1
long    | 2 waiters, socket, one gives up, thread | -DWAITERS=2 -DPROGRESS=1 -DFROM0=NEVER -DFROM1=NET -DGIVES_UP=0
long    | 1 waiter, asyncio, 2 writers, thread | -DWAITERS=2 -DPROGRESS=1 -DASYNC=1
long    | 1 waiter, asyncio, socket, thread    | -DWAITERS=2 -DPROGRESS=1 -DASYNC=1 -DFROM1=NET
large   | 2 waiters, 2 writers, one never drives, thread | -DWAITERS=2 -DPROGRESS=1 -DFOLLOWS=1
holds   | 1 waiter that never drives, thread   | -DWAITERS=1 -DPROGRESS=1 -DFOLLOWS=0 -DROUNDS=2
notices | 1 waiter that never drives, thread   | -DWAITERS=1 -DPROGRESS=1 -DFOLLOWS=0
holds   | 1 waiter that never drives, socket, thread | -DWAITERS=1 -DPROGRESS=1 -DFOLLOWS=0 -DFROM0=NET
holds   | 1 waiter, 1 writer, twice            | -DWAITERS=1 -DROUNDS=2
notices | 1 waiter, 1 writer                   | -DWAITERS=1
holds   | 1 waiter, writer, thread, twice      | -DWAITERS=1 -DROUNDS=2 -DPROGRESS=1
notices | 1 waiter, writer, thread             | -DWAITERS=1 -DPROGRESS=1
holds   | 1 waiter, socket, thread, a request  | -DWAITERS=1 -DPROGRESS=1 -DFROM0=NET -DSERVICE=1
notices | 1 waiter, socket, thread             | -DWAITERS=1 -DPROGRESS=1 -DFROM0=NET
holds   | 1 waiter, 2 jobs, thread             | -DWAITERS=1 -DPROGRESS=1 -DFROM0=JOB -DROUNDS=2
notices | 1 waiter, job, thread                | -DWAITERS=1 -DPROGRESS=1 -DFROM0=JOB
holds   | 1 waiter, another thread, thread     | -DWAITERS=1 -DPROGRESS=1 -DFROM0=OWN -DROUNDS=2
holds   | 2 waiters, both on other threads     | -DWAITERS=2 -DFROM0=OWN -DFROM1=OWN
holds   | hand-over between 2 waiters          | -DWAITERS=2 -DROUNDS=2
notices | hand-over between 2 waiters, once    | -DWAITERS=2
holds   | 2 waiters, one waits for ever        | -DWAITERS=2 -DFROM1=NEVER -DROUNDS=2
holds   | 2 waiters, socket, one gives up      | -DWAITERS=2 -DFROM0=NET -DFROM1=NET -DGIVES_UP=1
large   | 3 waiters, 3 writers                 | -DWAITERS=3
large   | 2 waiters, writer, socket, request, thread | -DWAITERS=2 -DPROGRESS=1 -DFROM1=NET -DSERVICE=1
'
# One line of the protocol taken away or displaced; the smallest configuration that shows it.
mutants='
breaks | no fence of the waiter after armed += 1  | -DWAITERS=2 -DFROM1=NEVER -DMUT_NO_WAITER_FENCE
breaks | no fence of the writer before armed      | -DWAITERS=1 -DMUT_NO_WRITER_FENCE
breaks | a leader leaves without waking followers | -DWAITERS=2 -DMUT_NO_HAND_OVER
breaks | followers woken before the unlock        | -DWAITERS=2 -DMUT_HAND_OVER_BEFORE_UNLOCK
breaks | follower sleeps without looking first    | -DWAITERS=2 -DFROM1=NEVER -DMUT_FOLLOWER_NO_LOOK
breaks | event_seq read after the look            | -DWAITERS=2 -DFROM1=NEVER -DMUT_SEQ_AFTER_LOOK
breaks | sleeper does not look again who drives   | -DWAITERS=2 -DMUT_FOLLOWER_NO_SECOND_LOOK
breaks | new leader does not look again, 2 waiters | -DWAITERS=2 -DMUT_LEADER_NO_LOOK
breaks | new leader does not look again, thread   | -DWAITERS=1 -DROUNDS=2 -DPROGRESS=1 -DMUT_LEADER_NO_LOOK
breaks | told to look before the doorbell is drained | -DWAITERS=2 -DFROM0=NET -DFROM1=NEVER -DMUT_WAKE_BEFORE_DRAIN
breaks | no fence between event_seq += 1 and sleepers | -DWAITERS=2 -DMUT_WAKE_RELAXED
breaks | unlock is no fence, 2 waiters            | -DWAITERS=2 -DMUT_UNLOCK_RELAXED
breaks | unlock is no fence, thread               | -DWAITERS=1 -DPROGRESS=1 -DMUT_UNLOCK_RELAXED
breaks | the lead not handed back to the thread   | -DWAITERS=1 -DPROGRESS=1 -DMUT_NO_HAND_BACK
breaks | handed back only if no follower slept    | -DWAITERS=2 -DPROGRESS=1 -DMUT_HAND_BACK_OR_OVER
breaks | no fence after parking for ever          | -DWAITERS=1 -DPROGRESS=1 -DMUT_PARK_RELAXED
breaks | a job is posted without a kick           | -DWAITERS=1 -DPROGRESS=1 -DFROM0=JOB -DMUT_POST_NO_KICK
breaks | another thread notifies without a kick   | -DWAITERS=1 -DFROM0=OWN -DMUT_NOTIFY_NO_KICK
breaks | ... kicks, but the new leader does not look | -DWAITERS=1 -DFROM0=OWN -DMUT_LEADER_NO_LOOK
'

say() { printf '%-4s %-8s %-48s %s\n' "$1" "$2" "$3" "$4"; }

# Builds and runs one line in a directory of its own; prints the verdict.
check() {
  local verdict=$1 name=$2 flags=$3 dir trail
  dir=$(mktemp -d "$scratch/XXXXXX") && cd "$dir" || return 1
  # Most searches are shorter than an optimizing compiler.
  local build=(-O0 -w -DMEMLIM=6000 -DVECTORSZ=2048 -DCOLLAPSE) run=(-n -E -m500000 -w22)
  if [ "$verdict" = notices ]; then
    flags="$flags -DLIVENESS"
    build+=(-DNFAIR=4)
    run+=(-a -f)
  else
    build+=(-DSAFETY -DNOCLAIM)
  fi
  [ "$verdict" = long ] && build[0]=-O2
  # shellcheck disable=SC2086  # flags are words
  if ! spin $flags -a "$here/wake.pml" > log 2>&1 || ! gcc "${build[@]}" -o pan pan.c >> log 2>&1
  then
    say FAIL "$verdict" "$name" "does not build: $(tail -1 log)"
    return 1
  fi
  ./pan "${run[@]}" > log 2>&1
  local states seconds found=''
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' log)
  seconds=$(sed -n 's/^pan: elapsed time \([0-9.]*\) .*/\1/p' log)
  case $(grep -m1 '^pan:1:' log) in
    *want*) found='somebody sleeps whose word is there' ;;
    *'drivers==1)'*) found='nobody listens, or two drive' ;;
    *doorbell*) found='work is left and nobody takes it' ;;
    *acceptance*) found='somebody is not woken for ever' ;;
    *assert*) found='broken invariant' ;;
    ?*) found='error' ;;
  esac
  if [ "$verdict" = breaks ]; then
    if [ -n "$found" ] && ! grep -q 'buf\[' <<< "$(grep -m1 '^pan:1:' log)"; then
      say ok "$verdict" "$name" "$found"
      return 0
    fi
    say FAIL "$verdict" "$name" "${found:-not found out: the model is blind here}"
    return 1
  fi
  if [ -z "$found" ] && grep -q 'errors: 0' log &&
    ! grep -Eq 'Search not completed|too small|out of memory|reached -DMEMLIM' log; then
    say ok "${verdict/long/holds}" "$name" "$states states, $seconds s"
    return 0
  fi
  say FAIL "$verdict" "$name" "${found:-search incomplete: $(tail -1 log)}"
  if [ -n "$found" ]; then
    # shellcheck disable=SC2086
    spin $flags -t -p -g "$here/wake.pml" > trail.txt 2>&1
    trail=$(mktemp --tmpdir wake-trail-XXXXXX) && mv trail.txt "$trail"
    echo "     the way there: $trail"
  fi
  return 1
}

if [ "${1:-}" = --one ]; then
  scratch=$2
  check "$3" "$4" "$5"
  exit
fi

which=${1:-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
while IFS='|' read -r verdict name flags; do
  verdict=$(xargs <<< "$verdict") name=$(xargs <<< "$name")
  [ -n "$verdict" ] || continue
  if [ "$verdict" = large ]; then
    [ "$which" = --all ] || continue
    verdict=long
  fi
  case $which in '' | --all) ;; *) [[ $name == *"$which"* ]] || continue ;; esac
  printf '%s\0%s\0%s\0' "$verdict" "$name" "$flags"
done <<< "$configurations$mutants" > "$scratch/list"
if [ ! -s "$scratch/list" ]; then
  echo "check.sh: no line's name contains '$which'" >&2
  exit 2
fi
if xargs -0 -n 3 -P "$(nproc)" "$0" --one "$scratch" < "$scratch/list"; then
  echo "all as expected"
else
  echo "check.sh: see the lines that say FAIL" >&2
  exit 1
fi
