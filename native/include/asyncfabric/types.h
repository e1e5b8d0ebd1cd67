// types.h: plain values that cross the Cython border. No behaviour, no ownership, no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "asyncfabric/status.h"

namespace asyncfabric {

// Handles are (slot | generation << 32): a handle of a freed slot is refused, never mistaken. 0 is never valid.
using RegionId = uint64_t;
using PeerId = uint64_t;
using KeyId = uint64_t;
using OpId = uint64_t;
using CounterId = uint64_t;
using WatchId = uint64_t;
using MarkId = uint64_t;

constexpr uint32_t kImmBits = 20;
constexpr uint32_t kMaxImm = (1u << kImmBits) - 1;  // largest value that users may name
constexpr int64_t kNoImm = -1;
constexpr int32_t kHostDevice = -1;  // otherwise the CUDA ordinal
constexpr size_t kMaxKeyBytes = 4096;
constexpr size_t kMaxAddressBytes = 4096;
constexpr size_t kMaxMessageBytes = 8192;  // payload of one two-sided send

enum Access : uint32_t {
  kAccessLocal = 0,
  kAccessRemoteWrite = 1,
  kAccessRemoteRead = 2,
};

enum class PollingMode : uint32_t { kAdaptive = 0, kBusy = 1, kManual = 2 };

struct RailSpec {
  std::string provider;  // "local", "tcp", "efa", "verbs", "fault+local", ...
  std::string device;    // "" lets the provider choose
  std::vector<std::pair<std::string, std::string>> options;
  bool optional = false;    // chosen by the machine, not named: left out with a reason when it cannot be opened
  std::string reason = {};  // why it is opened, for RailInfo
};

// A rail that was not opened, and why.
struct LeftOutRail {
  std::string rail;  // provider, or provider:device
  std::string reason;
};

struct EngineConfig {
  std::vector<RailSpec> rails;
  // Rails were chosen for this machine, of several kinds: memory that some of them cannot carry is registered with the others, and between
  // two processes that both have a cuda rail that one goes before local, since it carries memory of the host too.
  bool automatic = false;
  PollingMode polling = PollingMode::kAdaptive;
  uint64_t spin_ns = 20'000;
  uint64_t drain_deadline_ns = 5'000'000'000;
  uint64_t connect_deadline_ns = 5'000'000'000;
  uint64_t peer_deadline_network_ns = 5'000'000'000;
  uint64_t peer_deadline_host_ns = 1'000'000'000;
  uint64_t stripe_bytes = 64 * 1024;  // a write is split over rails only from this many bytes per rail on
  uint64_t inline_bytes = 16 * 1024;  // ops up to this size may be posted by the submitting thread
  uint32_t max_ops = 16384;           // ops in flight; one more is kBusy
  int32_t worker_cpu = -1;            // core to pin the worker to, -1: none
  std::string secret;                 // that peers have to prove; "": whoever comes is a peer
};

struct RailInfo {
  std::string provider;
  std::string device;
  std::string library;  // file that was opened, "" when nothing was loaded
  std::string version;
  double gbits_per_s = 0;  // 0: unknown
  bool ordered = false;
  bool can_read = false;
  bool can_gather = false;  // boxes can be written, see BoxBatch
  bool up = true;
  std::string reason;          // of its RailSpec
  std::string admission = {};  // "secret": peers prove it; "open": whoever comes is one
};

enum class CompletionKind : uint32_t {
  kOp = 0,        // a data op ended: cookie, status, bytes, duration_ns, rails
  kControl = 1,   // a control call ended: cookie, status, value = region / peer id
  kCounter = 2,   // an armed counter reached its target: cookie, value = the counter's value then
  kWatch = 3,     // an armed watch word changed: cookie, value = new word
  kPeerLost = 4,  // value = peer id, status states why; cookie 0
  kMessage = 5,   // two-sided messages came since they were last taken; cookie 0
  kWritable = 6,  // armed by arm_writable: an op slot is free again; cookie
  kClosed = 7,    // submit_close finished: nothing is in flight; cookie
};

struct ReceivedMessage {
  PeerId peer = 0;
  std::string payload;
};

struct Completion {
  uint64_t cookie = 0;
  CompletionKind kind = CompletionKind::kOp;
  Status status = {};
  uint64_t value = 0;
  uint64_t bytes = 0;        // bytes that left; of a failed op those of the requests that are known to have succeeded
  uint64_t duration_ns = 0;  // submission to completion
  uint64_t rails = 0;        // bit i: rail i was used
  uint64_t peer = 0;         // peer that the failure is about, 0: none
};

struct ScatterTarget {
  KeyId key = 0;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  uint64_t length = 0;
};

struct PageBatch {
  const int64_t* source_pages = nullptr;
  const int64_t* target_pages = nullptr;
  uint64_t count = 0;
  uint64_t page_bytes = 0;
  uint64_t source_stride = 0;
  uint64_t target_stride = 0;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
};

// Boxes of one region, each gathered in order into one contiguous place behind a key. A box is runs of equal length. Its row: the byte
// of the region where the first run begins, the byte behind the key where it goes, the bytes of a run (a multiple of kBoxRunBytes), then
// how many steps there are from run to run in each dimension, outermost first, then their strides in bytes; 1 and 0 fill up.
struct BoxBatch {
  const int64_t* rows = nullptr;  // of 3 + 2 * dimensions numbers
  uint64_t count = 0;
  uint64_t dimensions = 0;
  uint64_t* sums = nullptr;  // gets the XXH3 of each box as it was written; has to stay until the op has ended
};
constexpr uint64_t kBoxRunBytes = 64;
constexpr uint64_t kLeastBoxBytes = 256;

struct RegionInfo {
  void* base = nullptr;
  uint64_t length = 0;
  int32_t device = kHostDevice;
  uint32_t access = 0;
  uint64_t generation = 0;
  bool quarantined = false;
  std::string refused = {};  // rails that did not take the memory, and why; only where rails were chosen by the machine
};

struct KeyInfo {
  uint64_t incarnation = 0;
  uint64_t region = 0;
  uint64_t generation = 0;
  uint64_t length = 0;
  uint32_t access = 0;
  uint32_t rails = 0;
};

struct PeerInfo {
  PeerId id = 0;
  uint64_t incarnation = 0;
  uint32_t state = 0;  // 0 connecting, 1 connected, 2 lost, 3 disconnected
  uint32_t lanes = 0;
  std::string provider;
  uint64_t bytes_sent = 0;
  uint64_t ops_in_flight = 0;
};

struct OpProgress {
  uint64_t bytes_total = 0;
  uint64_t bytes_posted = 0;  // of requests that a rail has taken
  uint64_t bytes_done = 0;    // that left for certain
  uint64_t outstanding = 0;   // work requests posted and not yet completed
  PeerId peer = 0;
  bool known = false;
};

enum class TracePoint : uint64_t {
  kSubmit = 0,
  kStart = 1,
  kPost = 2,
  kDone = 3,
  kFinish = 4,
  kArrival = 5,
  kSleep = 6,
  kWake = 7,
  kPeer = 8
};

struct TraceEvent {
  uint64_t time_ns = 0;  // CLOCK_MONOTONIC
  TracePoint what = TracePoint::kSubmit;
  uint64_t subject = 0;  // op cookie, imm or peer id
  uint64_t value = 0;    // bytes, count or state
};

struct EngineStatistics {
  uint64_t ops_submitted = 0;
  uint64_t ops_completed = 0;
  uint64_t ops_failed = 0;
  uint64_t ops_cancelled = 0;
  uint64_t bytes_written = 0;
  uint64_t bytes_read = 0;
  uint64_t work_requests = 0;
  uint64_t immediates_sent = 0;
  uint64_t immediates_received = 0;
  uint64_t stale_arrivals = 0;
  uint64_t early_arrivals = 0;
  uint64_t messages_received = 0;
  uint64_t messages_refused = 0;  // malformed or hostile
  uint64_t steps = 0;
  uint64_t sleeps = 0;
  uint64_t loop_wakes = 0;
  uint64_t inline_steps = 0;
  uint64_t regions = 0;
  uint64_t registered_bytes = 0;
  uint64_t peers = 0;
  uint64_t quarantined_regions = 0;
  uint64_t unconfirmed_closes = 0;  // counters that are closed, and some peer has not confirmed it
};

}  // namespace asyncfabric
