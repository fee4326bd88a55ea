#!/usr/bin/env bash
# tools/need.sh NEED...: installs or names the things that a verb of the Makefile needs.
# Looks for the thing itself (a command, a header), not for a package, and changes nothing that
# exists. For root on a machine with apt it installs the missing packages; for others it prints
# their names. A NEED written ?NEED is optional: its absence is reported and does not fail.
set -euo pipefail
PYTHON=${PYTHON:-python3}

has() {
  case $1 in
    make) command -v make ;;
    python) command -v "$PYTHON" ;;
    venv) "$PYTHON" -c 'import ensurepip, venv' ;;
    headers) "$PYTHON" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ;;
    cxx) command -v c++ ;;
    cc) command -v cc ;;
    clang) command -v clang++ && command -v c++ ;; # clang takes the standard library from g++
    clang-rt) find "$(clang++ -print-resource-dir)/lib" -name 'libclang_rt.fuzzer*' | grep . ;;
    doctest) echo '#include <doctest/doctest.h>' | c++ -E -xc++ - ;;
    spin) command -v spin ;;
    ucx-headers) echo '#include <ucp/api/ucp.h>' | c++ -E -xc++ - ;;
    ssl-headers) echo '#include <openssl/ssl.h>' | c++ -E -xc++ - ;;
    ip) command -v ip ;;
    tc) command -v tc ;;
    fio) command -v fio ;;
    rsync) command -v rsync ;;
    passthrough) pkg-config --exists fuse3 &&
      [[ -e /usr/share/doc/libfuse3-dev/examples/passthrough_ll.c ]] ;;
    slurm) PATH=$PATH:/usr/sbin:/sbin; command -v slurmctld && command -v slurmd && command -v srun ;;
    openmpi) command -v mpirun.openmpi ;;
    mpich) command -v mpiexec.mpich ;;
    rig) [[ ! $(missing_of_rig) ]] ;;
    *) echo "need.sh: unknown need: $1" >&2; exit 2 ;;
  esac >/dev/null 2>&1
}

packages() {
  local python=${PYTHON##*/}
  case $1 in
    make) echo make ;;
    python) echo "$python" ;;
    venv) echo "$python-venv" ;;
    headers) echo "$python-dev" ;;
    cxx | cc) echo build-essential ;;
    clang) echo clang build-essential ;;
    clang-rt) echo "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev" ;;
    doctest) echo doctest-dev ;;
    spin) echo spin ;;
    ucx-headers) echo libucx-dev ;;
    ssl-headers) echo libssl-dev ;;
    ip | tc) echo iproute2 ;;
    fio) echo fio ;;
    rsync) echo rsync ;;
    passthrough) echo libfuse3-dev pkg-config ;;
    slurm) echo slurmctld slurmd slurm-client ;;
    openmpi) echo openmpi-bin ;;
    mpich) echo mpich ;;
    rig) missing_of_rig ;;
  esac
}

# Prints the missing packages for the two machines of tests/rdma. Their busybox has to be static.
missing_of_rig() {
  local PATH=$PATH:/usr/sbin:/sbin busybox
  command -v qemu-system-x86_64 >/dev/null || echo qemu-system-x86
  { busybox=$(command -v busybox) && ! ldd "$busybox" >/dev/null 2>&1; } || echo busybox-static
  command -v cpio >/dev/null || echo cpio
  command -v depmod >/dev/null || echo kmod
  command -v rdma >/dev/null || echo iproute2
  [[ -e /etc/libibverbs.d/rxe.driver ]] || echo ibverbs-providers
  command -v ibv_devinfo >/dev/null || echo ibverbs-utils
  command -v ib_write_bw >/dev/null || echo perftest
  command -v ucx_perftest >/dev/null || echo ucx-utils
}

# One installs at a time: make runs verbs in parallel, and apt-get fails while another one runs.
# Waits for other users of apt-get, such as a machine that has just started.
install() {
  (
    exec 9>"${TMPDIR:-/tmp}/tensorwire-need-$EUID.lock"
    command -v flock >/dev/null && flock 9
    has "$need" && exit
    echo "Installing $*"
    wait=(-o DPkg::Lock::Timeout=300)
    # apt-get itself does not wait for a lock on the lists.
    for _ in {1..60}; do
      apt-get update -qq 2>&1 | grep -q 'Unable to lock' || break
      sleep 1
    done
    DEBIAN_FRONTEND=noninteractive \
      apt-get install "${wait[@]}" -y -qq --no-install-recommends "$@" >/dev/null
  ) || true
}

for need in "$@"; do
  essential=yes
  [[ $need != '?'* ]] || essential=
  need=${need#'?'}
  has "$need" && continue
  mapfile -t wanted < <(packages "$need" | tr ' ' '\n')
  if [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
    install "${wanted[@]}"
    has "$need" && continue
  fi
  {
    echo "Missing here: $need. On Debian and Ubuntu it comes with"
    echo "    sudo apt-get install ${wanted[*]}"
  } >&2
  [[ ! $essential ]] || exit 1
done

if [[ " $* " == *" python "* ]]; then
  "$PYTHON" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit(f"tensorwire needs Python 3.11 or newer and {sys.executable} is "
             f"{sys.version.split()[0]}. Name a newer one: make PYTHON=python3.12 VERB")'
fi
