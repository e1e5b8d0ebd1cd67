// provider.h: the contract of a provider on one screen. One Rail = one opened device of one provider.
// Threads: methods marked [control] run on the control thread, one at a time. Methods marked [engine lock] run on whoever holds the
// engine lock (worker or caller thread), one at a time. [control] and [engine lock] calls never overlap on a rail unless
// capabilities().concurrent_control. `patience_ns` is a duration: how long the call may take. A rail knows nothing of
// counters, striping, ops or Python and reports all failures of posted work through poll().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "asyncfabric/types.h"
#include "base/unique_fd.h"

namespace asyncfabric {

struct Capabilities {
  bool ordered =
      false;  // an immediate that carries data is delivered after all earlier writes of the same (rail, peer) are
              // visible, and its completion implies that they completed. An empty signal may overtake them.
  bool synchronous = false;  // post() has moved the data when it returns; its completions come with the next poll
  bool read = false;
  bool concurrent_control = false;  // [control] calls may overlap [engine lock] calls
  bool reports_peer_loss = false;   // kPeerLost events come by themselves; otherwise the engine sends heartbeats
  bool same_host_only = false;
  bool gathers = false;                     // ordered, and takes requests with a Gatherer
  uint64_t max_request_bytes = 1ull << 30;  // longer writes are split by the engine
  uint64_t step_bytes = ~0ull;              // how much may be posted in one pass (synchronous rails keep this small)
  uint32_t list_pages = 0;          // > 0: a request whose local memory is on a GPU may be a list of so many pages
  uint32_t max_send_bytes = 16384;  // two-sided messages, at least kMaxMessageBytes + 1024
};

// Memory to register. `memfd` >= 0 when the engine allocated the pages itself: base is a MAP_SHARED mapping of memfd at 0.
struct Memory {
  void* base = nullptr;
  uint64_t length = 0;
  int32_t device = kHostDevice;
  int memfd = -1;
  uint32_t access = 0;
  int dmabuf = -1;  // of memory of a GPU, for NICs: a dma-buf that holds the range from dmabuf_offset on
  uint64_t dmabuf_offset = 0;
};

// Memory of a GPU that a rail allocated for the engine; freed when destroyed, after each rail released it.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* base() const = 0;
  virtual int handle_fd() const = 0;  // what Memory.memfd is for such memory: the allocation's shareable handle
};

// Opaque handles; each rail derives its own.
class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
};
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
};
class RailPeer {
 public:
  virtual ~RailPeer() = default;
};

// A point in a stream of the user, or a value of a word.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  virtual Status passed() = 0;  // [engine lock] kBusy: not yet
};

struct Page {           // in the direction of the copy
  uint64_t source = 0;  // byte offset of a write in the region, of a read in the key's range
  uint64_t target = 0;  // byte offset of a write in the key's range, of a read in the region
};

// Bytes that lie apart, of which a rail that moves bytes itself takes the next ones in order. [engine lock]
class Gatherer {
 public:
  virtual ~Gatherer() = default;
  // `length` bytes, behind the first `before` ones of all: once, in order. False, and nothing was copied: it is not their turn.
  virtual bool copy(uint8_t* to, uint64_t before, uint64_t length) = 0;

  // The same by several threads. Parts begin `at` multiples of kPartBytes; each once, by anybody, between begin and end.
  static constexpr uint64_t kPartBytes = 1024;
  virtual bool begin_parts(uint64_t before,
                           uint64_t length) = 0;  // false: it is not their turn, or only for one thread
  virtual void copy_part(uint8_t* to, uint64_t at, uint64_t length) = 0;  // [any]
  virtual void end_parts() = 0;                                           // all are copied
};

enum class WorkKind : uint8_t { kWrite, kRead, kSend };

struct WorkRequest {
  WorkKind kind = WorkKind::kWrite;
  bool signalled = true;   // false only on ordered rails: no event unless it fails
  bool delivered = false;  // the completion must mean "visible at the target", not only "buffer reusable"
  bool has_imm = false;
  bool urgent = false;  // kSend: a sign of life, which may overtake what waits inside the rail
  uint32_t imm = 0;
  RailPeer* peer = nullptr;
  LocalMemory* local = nullptr;    // null for kSend and for length 0
  RemoteMemory* remote = nullptr;  // null for kSend and for a signal (length 0, has_imm)
  // A write that takes its bytes from here, behind the first `gathered` ones; `address` then only says that there are some.
  Gatherer* gather = nullptr;
  uint64_t gathered = 0;
  const void* address = nullptr;  // local bytes; kSend: payload, copied or sent before post returns
  uint64_t remote_offset = 0;     // from the start of the registered memory behind `remote`
  uint64_t length = 0;
  const Page* pages =
      nullptr;  // a list: length bytes in `page_count` pages of one size, whose offsets count from `address`
  uint32_t page_count =
      0;  // and `remote_offset`. Read before post returns, or from shared words until the request is reported
  uint64_t last_page = 0;  // no offset of the list behind the key is larger
  uint64_t page_bits = 0;  // every offset of the list, or'ed
  uint64_t tag = 0;        // comes back in RailEvent
};

// kPathDown: requests to this one peer do not get through now, and the rail works on it; the peer may live. Until kPathUp what
// is posted to it may be refused as busy, and is better posted over another rail.
enum class RailEventKind : uint8_t { kDone, kImmediate, kMessage, kPeerLost, kRailDown, kRailUp, kPathDown, kPathUp };

struct RailEvent {
  RailEventKind kind = RailEventKind::kDone;
  Status status;
  uint64_t tag = 0;               // kDone
  uint32_t imm = 0;               // kImmediate: the bytes that came before it are visible to this thread
  RailPeer* peer = nullptr;       // kPeerLost, kPathDown, kPathUp
  uint64_t connection = 0;        // kMessage: the connection of a peer's rail that brought it; 0: the rail cannot say
  const uint8_t* data = nullptr;  // kMessage: valid until the next poll
  uint32_t length = 0;
};

struct PostResult {
  size_t accepted = 0;  // requests [0, accepted) are owned by the rail and will be reported
  Status status;        // why request [accepted] was not taken; kBusy: try again after a poll
};

class Rail {
 public:
  virtual ~Rail() = default;  // flushes: after it nothing touches registered memory
  virtual const Capabilities& capabilities() const = 0;
  virtual RailInfo info() const = 0;
  virtual std::string address() const = 0;  // bounded by 512 bytes; what a peer's connect() needs

  // [control] Only rails of a GPU know these. `why()` says in a sentence what the last [control] call refused, "" if nothing.
  virtual Status allocate_memory(uint64_t, int32_t, std::unique_ptr<DeviceMemory>*) { return StatusCode::kUnsupported; }
  virtual std::string why() const { return {}; }
  // A dma-buf of memory of this GPU, which the rails of NICs are shown; it is open as long as the region is.
  virtual Status export_dmabuf(const void*, uint64_t, UniqueFd*, uint64_t*) { return StatusCode::kUnsupported; }
  // Lets kernels reach words of the host at their own address until the rail closes. Called before the worker runs, for words that they
  // wait for or store to, and for the room that lists of pages lie in.
  virtual Status share_words(void*, uint64_t) { return {}; }
  // Any thread: makes a stream of the user wait until the shared word is at least `value`.
  virtual Status stream_wait(void*, const uint64_t*, uint64_t) { return StatusCode::kUnsupported; }
  // Any thread: what NICs wrote to memory of this GPU, before their immediates were polled, is visible to its kernels on return.
  virtual Status flush_nic_writes() { return {}; }
  // Any thread: what a stream was given so far, to be asked about under the engine lock.
  virtual Status mark_stream(void*, std::unique_ptr<StreamMark>*) { return StatusCode::kUnsupported; }

  // [control]
  virtual Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) = 0;
  // These two may answer kDrainTimeout when their patience is over: called again they go on with the same wait.
  virtual Status revoke_memory(LocalMemory& memory, uint64_t patience_ns,
                               std::string* new_key) = 0;  // old keys dead on return
  virtual Status release_memory(std::unique_ptr<LocalMemory>& memory,
                                uint64_t patience_ns) = 0;  // kDrainTimeout: kept pinned
  virtual Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) = 0;
  virtual Status attach(RailPeer& peer, std::string_view key,
                        std::unique_ptr<RemoteMemory>* out) = 0;  // hostile bytes: refuse

  // [engine lock] Flushes: each outstanding request to the peer is reported as failed and touches nothing any more (kOk), or
  // kUnsupported: the rail cannot promise that, and the requests stay outstanding until the transport reports them.
  virtual Status disconnect(RailPeer& peer) = 0;
  // [engine lock] What this connection of a peer's rail still brings is not reported any more, whatever its sender does: the engine has
  // lost the peer, which may live.
  virtual void shut_out(uint64_t) {}

  // [engine lock]
  virtual PostResult post(std::span<const WorkRequest> requests) = 0;
  virtual size_t poll(std::span<RailEvent> events) = 0;
  virtual int wait_fd() const = 0;  // -1: none, the worker sleeps in short naps
  virtual bool prepare_wait() = 0;  // arm wait_fd; false: there is work, do not sleep
  virtual void cancel_wait() = 0;   // awake again
};

// Opens the rail named by `spec`; `detail` says in a sentence why not. Called on the opening thread before the worker runs.
using OpenRail = Status (*)(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

}  // namespace asyncfabric
