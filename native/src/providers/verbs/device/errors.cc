// errors.cc: the tables behind errors.h.
#include "providers/verbs/device/errors.h"

#include <cerrno>

namespace asyncfabric::verbs {

Status status_of_work(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return StatusCode::kOk;
    // Bounds and rights were checked against the key before posting, so what the target refuses is a key that is dead.
    case IBV_WC_REM_ACCESS_ERR: return {StatusCode::kStaleKey, status};
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR: return {StatusCode::kInternal, status};
    default: return {StatusCode::kTransport, status};
  }
}

// Not LOC_QP_OP_ERR: a soft-RoCE device whose interface is down reports that, before it reports the port.
bool peer_answered(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_LOC_LEN_ERR:  // our own mistakes show nothing about the peer either, so nobody has to wait for its word
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR: return true;
    default: return false;
  }
}

Status status_of_call(int error) {
  switch (error) {
    case 0: return StatusCode::kOk;
    case ENOMEM:
    case ENOSPC:
    case EAGAIN: return {StatusCode::kNoMemory, error};
    case EINVAL: return {StatusCode::kInvalidArgument, error};
    case EOPNOTSUPP:
    case ENOSYS: return {StatusCode::kUnsupported, error};
    case ENODEV: return {StatusCode::kNoProvider, error};
    default: return {StatusCode::kTransport, error};
  }
}

}  // namespace asyncfabric::verbs
