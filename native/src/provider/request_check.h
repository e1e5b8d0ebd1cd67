// request_check.h: what a rail refuses before it posts. Under the engine lock; for rails whose keys carry their region's length and rights
// (Remote has a `key` with length and access, Local has contains()).
#pragma once

#include "provider/work.h"

namespace asyncfabric {

template <typename Remote, typename Local>
Status check_request(const WorkRequest& request, uint64_t max_message_bytes, uint64_t max_request_bytes) {
  if (request.kind == WorkKind::kSend)
    return request.length <= max_message_bytes ? Status() : Status(StatusCode::kInvalidArgument);
  if (request.remote == nullptr)
    return request.length == 0 && request.has_imm ? Status() : Status(StatusCode::kInvalidArgument);
  const auto& key = static_cast<const Remote*>(request.remote)->key;
  if (request.remote_offset > key.length || request.length > key.length - request.remote_offset)
    return StatusCode::kOutOfBounds;
  const uint32_t right = request.kind == WorkKind::kRead ? kAccessRemoteRead : kAccessRemoteWrite;
  if ((key.access & right) == 0) return StatusCode::kAccessDenied;
  if (request.length == 0) return {};
  if (request.length > max_request_bytes) return StatusCode::kInvalidArgument;
  const auto* local = static_cast<const Local*>(request.local);
  if (local == nullptr) return StatusCode::kInvalidArgument;
  return local->contains(request.address, request.length) ? Status() : Status(StatusCode::kOutOfBounds);
}

}  // namespace asyncfabric
