// errors.cc: the table behind errors.h. What each provider really reports was found by experiment; the tests keep it so.
#include "providers/libfabric/device/errors.h"

#include <cerrno>

#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {

Status status_of_work(int error) {
  switch (error) {
    case 0: return StatusCode::kOk;
    case FI_EINVAL:  // requests are checked before they are posted: what is invalid is the key, at the target
    case FI_ENOKEY:
    case FI_EKEYREJECTED:
    case EKEYREVOKED:
    case EKEYEXPIRED: return {StatusCode::kStaleKey, error};
    case FI_EACCES:  // known key, but out of its bounds or without the right
    case FI_EPERM:
    case FI_EFAULT: return {StatusCode::kAccessDenied, error};
    case FI_ECONNREFUSED:
    case FI_ECONNRESET:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_ESHUTDOWN:
    case EPIPE:
    case FI_EHOSTUNREACH:
    case FI_EHOSTDOWN:
    case FI_ENETUNREACH:
    case FI_ENETDOWN:
    case FI_ETIMEDOUT: return {StatusCode::kPeerDead, error};
    case FI_ECANCELED: return {StatusCode::kCancelled, error};
    case FI_ENOMEM: return {StatusCode::kNoMemory, error};
    default: return {StatusCode::kTransport, error};
  }
}

bool connection_broke(int error) {
  switch (error) {
    case FI_ECANCELED:  // net: queued behind the request that met the end of the connection
    case FI_ECONNRESET:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_ESHUTDOWN:
    case EPIPE:
    case FI_EIO: return true;
    default: return false;
  }
}

Status status_of_control(int error) {
  switch (error) {
    case 0: return StatusCode::kOk;
    case FI_ENOMEM:
    case FI_ENOSPC:
    case EMFILE:
    case ENFILE: return {StatusCode::kNoMemory, error};
    case FI_EINVAL: return {StatusCode::kInvalidArgument, error};
    case FI_ENODATA:
    case FI_ENOSYS:
    case FI_ENODEV: return {StatusCode::kNoProvider, error};
    default: return {StatusCode::kTransport, error};
  }
}

}  // namespace asyncfabric::libfabric
