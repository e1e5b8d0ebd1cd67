// poster.cc: see poster.h. Order of the parts: post and dispatch, the three ways of moving bytes, messages.
// The bookkeeping of entries and completions is in poster_ledger.cc.
#include "providers/local/transfers/poster.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "providers/local/memory/regions.h"

namespace asyncfabric::local {
namespace {

Status check(const WorkRequest& request, const RemoteHandle& remote) {
  if (request.address == nullptr || request.length > kMaxRequestBytes) return StatusCode::kInvalidArgument;
  if (request.remote_offset > remote.length || request.length > remote.length - request.remote_offset)
    return StatusCode::kOutOfBounds;
  const uint32_t right = request.kind == WorkKind::kRead ? kAccessRemoteRead : kAccessRemoteWrite;
  return (remote.access & right) != 0 ? Status() : Status(StatusCode::kAccessDenied);
}

Status refusal(const Outgoing& link) { return link.alive() ? StatusCode::kStaleKey : StatusCode::kPeerDead; }

// A process number means nothing once its owner is dead and reaped. Numbers are handed out in a circle, which takes far
// longer than this, so a fresh look at the pidfd every few milliseconds keeps the kernel's copies out of strangers.
bool surely_alive(Outgoing& link) {
  constexpr uint64_t kBelieveNs = 5'000'000;
  const uint64_t now = now_ns();
  if (now - link.seen_alive_ns < kBelieveNs) return true;
  if (link.process->gone()) return false;
  link.seen_alive_ns = now;
  return true;
}

// A copy of a page ends before the processor has learned where the next page begins. Asking for its first lines now is
// worth 30 % at 4 KiB, 8 % at 16 KiB; the hardware's own prefetch does the rest. Always inline: GCC takes a function
// that only prefetches for one without effect and drops the call.
[[gnu::always_inline]] inline void prefetch_source(const WorkRequest& next) {
  constexpr size_t kLines = 16;
  constexpr uint64_t kLargest = 128 << 10;
  if (next.kind != WorkKind::kWrite || next.gather != nullptr || next.address == nullptr || next.length > kLargest)
    return;
  const auto* bytes = static_cast<const uint8_t*>(next.address);
  const size_t lines = std::min<size_t>(kLines, next.length / kLineBytes);
  for (size_t line = 0; line < lines; ++line) __builtin_prefetch(bytes + line * kLineBytes);
}

}  // namespace

PostResult Poster::post(std::span<const WorkRequest> requests) {
  PostResult result;
  while (result.accepted < requests.size()) {
    if (result.accepted + 1 < requests.size()) prefetch_source(requests[result.accepted + 1]);
    const size_t taken = accept(requests.subspan(result.accepted));
    if (taken == 0) {
      result.status = StatusCode::kBusy;
      break;
    }
    result.accepted += taken;
  }
  let_go();
  for (Outgoing* link : touched_) announce(*link);
  touched_.clear();
  return result;
}

size_t Poster::accept(std::span<const WorkRequest> rest) {
  const WorkRequest& request = rest.front();
  Outgoing& link = *static_cast<PeerHandle*>(request.peer)->link;
  if (!link.alive()) {
    finish(link, request, StatusCode::kPeerDead);
    return 1;
  }
  if (request.kind == WorkKind::kSend) return send(link, request);
  if (request.length > 0) return accept_transfer(link, rest);
  if (request.has_imm) {
    if (!with_room(link, [&] { return room_for_imms(link, 1); })) return 0;
    add_imm(link, request);
  }
  finish(link, request, Status());
  return 1;
}

size_t Poster::accept_transfer(Outgoing& link, std::span<const WorkRequest> rest) {
  const WorkRequest& request = rest.front();
  if (request.remote == nullptr) {
    finish(link, request, StatusCode::kInvalidArgument);
    return 1;
  }
  const RemoteHandle& remote = *static_cast<const RemoteHandle*>(request.remote);
  if (const Status status = check(request, remote); !status.ok()) {
    finish(link, request, status);
    return 1;
  }
  if ((remote.access & kTraitByOwner) != 0) return bounce(link, remote, request);
  if (remote.direct == nullptr && request.gather != nullptr) {
    finish(link, request, StatusCode::kUnsupported);
    return 1;
  }
  if (remote.direct != nullptr) {
    const size_t together = pool_.present() ? copy_together(link, remote, rest) : 0;
    return together != 0 ? together : copy_directly(link, remote, request);
  }
  return link.foreign == ForeignPath::kBounce ? bounce(link, remote, request) : copy_by_kernel(link, remote, rest);
}

size_t Poster::copy_directly(Outgoing& link, const RemoteHandle& remote, const WorkRequest& request) {
  if (request.has_imm && !with_room(link, [&] { return room_for_imms(link, 1); })) return 0;
  if (request.length >= kLargeBytes && link.touched) announce(link);
  if (!hold(link, remote)) {
    finish(link, request, refusal(link));
    return 1;
  }
  uint8_t* there = remote.direct + request.remote_offset;
  if (request.gather != nullptr) {
    const bool together = pool_.present() && pool_.gather(*request.gather, there, request.gathered, request.length);
    if (!together && !request.gather->copy(there, request.gathered, request.length)) {
      finish(link, request, StatusCode::kInternal);  // an earlier one of its op failed
      return 1;
    }
  } else if (request.kind == WorkKind::kWrite) {
    copier_.copy(there, request.address, request.length);
  } else {
    copier_.copy(const_cast<void*>(request.address), there, request.length);
  }
  if (request.has_imm) add_imm(link, request);
  finish(link, request, Status());
  return 1;
}

// Requests from the front that the copy pool copies at once: of one remote memory, each behind the one before, so that none overlap.
// 0: they are not worth it.
size_t Poster::copy_together(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest) {
  const WorkRequest& front = rest.front();
  size_t count = 0;
  uint32_t imms = 0;
  uint64_t bytes = 0;
  uint64_t behind = front.remote_offset;
  for (const WorkRequest& request : rest) {
    if (count == kMostTogether || bytes + request.length > kMaxRunBytes) break;
    if (count != 0 && (request.kind != WorkKind::kWrite || front.kind != WorkKind::kWrite)) break;
    if (request.peer != front.peer || request.remote != front.remote || request.length == 0) break;
    if (request.gather != nullptr || request.remote_offset < behind || !check(request, remote).ok()) break;
    if (request.has_imm && !room_for_imms(link, imms + 1)) break;
    auto* there = remote.direct + request.remote_offset;
    auto* here = static_cast<uint8_t*>(const_cast<void*>(request.address));
    together_[count++] =
        request.kind == WorkKind::kWrite ? Piece{there, here, request.length} : Piece{here, there, request.length};
    imms += request.has_imm ? 1 : 0;
    bytes += request.length;
    behind = request.remote_offset + request.length;
  }
  if (bytes < CopyPool::kWorthBytes) return 0;
  if (link.touched) announce(link);
  if (!hold(link, remote)) {
    finish(link, front, refusal(link));
    return 1;
  }
  pool_.copy({together_.data(), count});
  for (const WorkRequest& request : rest.first(count)) {
    if (request.has_imm) add_imm(link, request);
    finish(link, request, Status());
  }
  return count;
}

// How many requests from the front the kernel copies in one run; fills its pieces.
size_t Poster::gather(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest) {
  size_t count = 0;
  uint32_t imms = 0;
  uint64_t bytes = 0;
  kernel_copy_.clear();
  for (const WorkRequest& request : rest) {
    if (request.peer != rest.front().peer || request.remote != rest.front().remote ||
        request.kind != rest.front().kind || request.length == 0 || !check(request, remote).ok())
      break;
    if (!kernel_copy_.has_room(request.length) || bytes + request.length > kMaxRunBytes) break;
    if (request.has_imm && !room_for_imms(link, imms + 1)) break;
    imms += request.has_imm ? 1 : 0;
    bytes += request.length;
    kernel_copy_.add(static_cast<uint8_t*>(const_cast<void*>(request.address)),
                     reinterpret_cast<uint8_t*>(remote.base + request.remote_offset), request.length);
    ++count;
  }
  return count;
}

size_t Poster::copy_by_kernel(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest) {
  const WorkRequest& front = rest.front();
  if (front.has_imm && !with_room(link, [&] { return room_for_imms(link, 1); })) return 0;
  if (!surely_alive(link)) {
    finish(link, front, StatusCode::kPeerDead);
    return 1;
  }
  const size_t count = gather(link, remote, rest);
  if (link.touched) announce(link);
  if (!hold(link, remote)) {
    finish(link, front, refusal(link));
    return 1;
  }
  const ssize_t moved = kernel_copy_.run(link.process->pid(), front.kind == WorkKind::kWrite);
  if (moved < 0 && bounce_when_refused_ && (errno == EPERM || errno == ENOSYS)) {
    link.foreign = ForeignPath::kBounce;
    return bounce(link, remote, front);
  }
  size_t done = 0;
  for (uint64_t end = 0; done < count && moved > 0; ++done) {
    end += rest[done].length;
    if (end > static_cast<uint64_t>(moved)) break;
    if (rest[done].has_imm) add_imm(link, rest[done]);
    finish(link, rest[done], Status());
  }
  if (done > 0) return done;  // the one that failed comes to the front and reports its error
  const int error = moved < 0 ? errno : EFAULT;
  const StatusCode code = error == ESRCH                      ? StatusCode::kPeerDead
                          : error == EPERM || error == ENOSYS ? StatusCode::kAccessDenied
                                                              : StatusCode::kTransport;
  finish(link, front, {code, error});
  return 1;
}

size_t Poster::bounce(Outgoing& link, const RemoteHandle& remote, const WorkRequest& request) {
  uint32_t staging = 0;
  const auto length = static_cast<uint32_t>(request.length);
  close_batch(link);
  const auto attempt = [&] {
    settle();  // verdicts have as many places as the ring has entries: those that are there make room for this one's
    return link.ring.has_room(1) && link.ring.reserve(length, link.oldest_awaited(), &staging);
  };
  if (!with_room(link, attempt)) return 0;
  const bool write = request.kind == WorkKind::kWrite;
  if (request.gather != nullptr) {
    if (!request.gather->copy(link.ring.staging(staging), request.gathered, request.length)) {
      finish(link, request, StatusCode::kInternal);  // an earlier one of its op failed
      return 1;
    }
  } else if (write) {
    copier_.copy(link.ring.staging(staging), request.address, request.length);
  }
  EntryBody body{};
  body.kind = write ? EntryKind::kBounceWrite : EntryKind::kBounceRead;
  body.has_imm = write && request.has_imm ? 1 : 0;
  body.length = length;
  body.bounce = {remote.word, request.remote_offset, remote.slot, staging, request.imm, 0};
  Deferred deferred;
  deferred.position = link.ring.publish(body);
  deferred.tag = request.tag;
  deferred.read_target = write ? nullptr : const_cast<void*>(request.address);
  deferred.staging = staging;
  deferred.length = length;
  deferred.awaits = true;
  deferred.signalled = request.signalled;
  defer(link, deferred);
  touch(link);
  return 1;
}

size_t Poster::send(Outgoing& link, const WorkRequest& request) {
  if (request.length > kMaxSendBytes) {
    finish(link, request, StatusCode::kInvalidArgument);
    return 1;
  }
  EntryBody body{};
  body.kind = EntryKind::kMessage;
  body.length = static_cast<uint32_t>(request.length);
  body.inlined = body.length <= kInlineBytes ? 1 : 0;
  uint8_t* bytes = body.bytes;
  close_batch(link);
  uint32_t staging = 0;
  const uint64_t keep_from = link.oldest_awaited();
  const auto attempt = [&] {
    return link.ring.has_room(1) && (body.inlined != 0 || link.ring.reserve(body.length, keep_from, &staging));
  };
  if (!with_room(link, attempt)) return 0;
  if (body.inlined == 0) {
    body.staging = staging;
    bytes = link.ring.staging(staging);
  }
  if (body.length > 0) std::memcpy(bytes, request.address, body.length);
  link.ring.publish(body);
  touch(link);
  finish(link, request, Status());
  return 1;
}

}  // namespace asyncfabric::local
