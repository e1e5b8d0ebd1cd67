#!/bin/bash
# ring.sh: what `make rxe` runs in the guest: the native tests over RDMA devices, then pytest over the rings that use them.
# --all runs all of it, two to three times as long; other arguments go to pytest instead of the standard choice. Every part runs even when an
# earlier one failed; the status is the worst.
set -u
python=$PWD/.venv/bin/python
status=0
worst() { [ "$1" -gt "$status" ] && status=$1; }

# The watchdog of the outside would bite a machine that is a dozen times slower.
run_pytest() {
  echo "==== pytest $*"
  ASYNCFABRIC_TEST_WATCHDOG_S=280 "$python" -P -m pytest -q -p no:xdist -p no:pytest_cov -o faulthandler_timeout=280 --color=no --durations=15 "$@"
  worst $?
}

run_native() {
  echo "==== $1 $2"
  "build/native-release/$1" --gtest_filter="$2" --gtest_brief=1
  worst $?
}

export ASYNCFABRIC_TEST_STORM_RAILS=verbs
several='integrity or odd_offsets or parallel_writes or visible_when or counts_of or distinct_strides or batches or scatter_to_one
  or drained or under_fire or one_failure or bidirectional or reads_of or check_reads'
one='not (unreachable or hundred_thousand or deep_queue)'  # the longest, and the same over every rail
bytes='integrity or counts_of or generations or release_of or revoked_keys'
if [ "$*" = --all ]; then
  export ASYNCFABRIC_TEST_RXE=all
  one='verbs' several='verbs'
  bytes="$bytes or batches or bidirectional or drained or messages or reads"
  shift
fi
several=${several//$'\n'/ }

if [ $# -eq 0 ]; then
  run_native verbs_tests '*'
  run_native libfabric_tests '*/verbs'
  run_native engine_tests '*EngineKeys*/verbs'
  # The suite over one rail; over two what several rails change, and over libfabric what it does with bytes. One process for what needs no
  # other: to start Python and to import costs half a minute here. libfabric has one of its own, which its crash would take along.
  run_pytest tests/attackers -k 'let_in or honest'
  run_pytest tests/rxe --ignore=tests/rxe/test_harness.py tests/integration/test_counter_storm.py tests/conformance/test_conformance.py \
    -k "not test_conformance or not ofi and (verbs-1 and $one or verbs-2 and ($several))"
  run_pytest tests/conformance/test_conformance.py -k "ofi-verbs and ($bytes)"
else
  run_pytest "$@"
fi
exit $status
