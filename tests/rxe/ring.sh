#!/bin/bash
# ring.sh: what `make rxe` runs in the guest: the native tests over RDMA devices, then pytest over the rings that use them.
# Arguments go to pytest instead of the standard choice. Every part runs even when an earlier one failed; the status is the worst.
set -u
python=$PWD/.venv/bin/python
status=0
worst() { [ "$1" -gt "$status" ] && status=$1; }

# The watchdog of the outside would bite a machine that is a dozen times slower.
run_pytest() {
  echo "==== pytest $*"
  ASYNCFABRIC_TEST_WATCHDOG_S=280 "$python" -P -m pytest -q -o faulthandler_timeout=280 --color=no --durations=5 "$@"
  worst $?
}

run_native() {
  echo "==== $1 $2"
  "build/native-release/$1" --gtest_filter="$2" --gtest_brief=1
  worst $?
}

if [ $# -eq 0 ]; then
  run_native verbs_tests '*'
  run_native libfabric_tests '*/verbs'
  run_pytest tests/rxe
  ASYNCFABRIC_TEST_STORM_RAILS=verbs run_pytest tests/integration/test_counter_storm.py
  # All of the suite over one rail. What one rail shows as well is not repeated over two, nor what other rails of libfabric show.
  once='unreachable or hostile or bad_ or bounds or exceptions or trace or why or watch or statistics or hundred or many_peers
    or busy or waiters or iteration or refused'
  run_pytest tests/conformance/test_conformance.py -k "not ofi and (verbs-1 or verbs-2 and not (${once//$'\n'/ }))"
  bytes='integrity or counts_of or generations or batches or bidirectional or drained or release_of or revoked or messages or reads'
  run_pytest tests/conformance/test_conformance.py -k "ofi-verbs and ($bytes)"  # by itself: a crash of libfabric takes the process along
else
  run_pytest "$@"
fi
exit $status
