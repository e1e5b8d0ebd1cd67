// status.h: how native code reports what happened. One X-macro table is the only place that lists codes.
// Trivially copyable, made on any thread, never thrown. The translation into Python exceptions reads
// `kind` (how much is broken) and lives in one file, cython_ext/status.pxi.
#pragma once

#include <cstdint>

namespace asyncfabric {

// How much is broken, so what a caller can do next.
enum class StatusKind : uint16_t {
  kNone = 0,       // nothing
  kBusy = 1,       // nothing is broken: drain and retry
  kClosed = 2,     // you closed it
  kCancelled = 3,  // you cancelled it
  kValue = 4,      // misuse: a bad argument
  kStale = 5,      // a key of a revoked region or of an earlier incarnation
  kTransfer = 6,   // one transfer
  kPeer = 7,       // one peer
  kDevice = 8,     // one NIC port, one rail
  kInternal = 9,   // our invariant broke
};

// X(code, number, kind, text)
#define ASYNCFABRIC_STATUS_TABLE(X)                                                                            \
  X(kOk, 0, kNone, "ok")                                                                                       \
  X(kBusy, 1, kBusy, "a bounded queue is full")                                                                \
  X(kClosed, 2, kClosed, "the object was closed or released")                                                  \
  X(kCancelled, 3, kCancelled, "the operation was cancelled")                                                  \
  X(kInvalidArgument, 4, kValue, "an argument is malformed")                                                   \
  X(kOutOfBounds, 5, kValue, "a range leaves its region")                                                      \
  X(kStaleKey, 6, kStale, "the key belongs to a revoked generation or an earlier incarnation")                 \
  X(kAccessDenied, 7, kTransfer, "the target refused the access")                                              \
  X(kTransport, 8, kTransfer, "the transport reported an error")                                               \
  X(kAmbiguous, 9, kTransfer, "the transfer may or may not have been counted")                                 \
  X(kDrainTimeout, 10, kTransfer, "the transfer did not drain before its deadline; the region is quarantined") \
  X(kUnsupported, 11, kTransfer, "no rail to this peer can do this")                                           \
  X(kPeerDead, 12, kPeer, "the peer process died or stopped answering")                                        \
  X(kPeerUnreachable, 13, kPeer, "the peer could not be reached before the deadline")                          \
  X(kPeerRejected, 14, kPeer, "the peer refused the connection")                                               \
  X(kRailDown, 15, kDevice, "the rail went down")                                                              \
  X(kNoMemory, 16, kDevice, "memory could not be allocated or registered")                                     \
  X(kNoProvider, 17, kDevice, "the provider or its library is not available")                                  \
  X(kTimeout, 18, kTransfer, "the deadline passed")                                                            \
  X(kInternal, 19, kInternal, "an internal invariant broke")                                                   \
  X(kUnconfirmed, 20, kBusy, "a peer has not confirmed yet that the counter of before is closed")              \
  X(kNotTaken, 21, kTransfer, "the peer takes no more messages")                                               \
  X(kSecretRefused, 22, kPeer, "this fabric and the peer do not have the same secret")

enum class StatusCode : uint16_t {
#define X(code, number, kind, text) code = number,
  ASYNCFABRIC_STATUS_TABLE(X)
#undef X
};

constexpr StatusKind status_kind(StatusCode code) {
  switch (code) {
#define X(code, number, kind, text) \
  case StatusCode::code: return StatusKind::kind;
    ASYNCFABRIC_STATUS_TABLE(X)
#undef X
  }
  return StatusKind::kInternal;
}

constexpr const char* status_text(StatusCode code) {
  switch (code) {
#define X(code, number, kind, text) \
  case StatusCode::code: return text;
    ASYNCFABRIC_STATUS_TABLE(X)
#undef X
  }
  return "unknown status";
}

struct Status {
  StatusCode code = StatusCode::kOk;
  StatusKind kind = StatusKind::kNone;
  int32_t raw = 0;  // number from the NIC, the library or the OS (errno), 0 when there is none

  constexpr Status() = default;
  constexpr Status(StatusCode c, int32_t raw_number = 0)  // NOLINT: implicit on purpose, `return StatusCode::kBusy`
      : code(c), kind(status_kind(c)), raw(raw_number) {}
  constexpr bool ok() const { return code == StatusCode::kOk; }
};

}  // namespace asyncfabric
