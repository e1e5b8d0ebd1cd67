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
#include "provider/memory.h"
#include "provider/work.h"

namespace asyncfabric {

class GpuRail;  // gpu_rail.h

struct Capabilities {
  // An immediate that carries data is delivered after all earlier writes of the same (rail, peer) are visible, and its completion
  // implies that they completed. An empty signal may overtake them.
  bool ordered = false;
  bool synchronous = false;  // post() has moved the data when it returns; its completions come with the next poll
  bool read = false;
  bool concurrent_control = false;  // [control] calls may overlap [engine lock] calls
  bool reports_peer_loss = false;   // kPeerLost events come by themselves; otherwise the engine sends heartbeats
  bool same_host_only = false;
  bool maps = false;                        // RemoteMemory::mapped may know where the bytes lie
  bool gathers = false;                     // ordered, and takes requests with a Gatherer (gatherer.h)
  uint64_t max_request_bytes = 1ull << 30;  // longer writes are split by the engine
  uint64_t max_gpu_request_bytes = 0;       // > 0: the same where the local memory is on a GPU
  uint64_t step_bytes = ~0ull;              // how much may be posted in one pass (synchronous rails keep this small)
  uint32_t step_requests = 64;              // the same, in requests
  uint32_t list_pages = 0;       // > 0: a request whose local memory is on a GPU may be a list of so many pages
  bool resumes_connect = false;  // connect() waits for the peer's rail; where it answers kBusy, the next call goes on
  uint32_t max_send_bytes = 16384;  // two-sided messages, at least kMaxMessageBytes + 1024
};

class Rail {
 public:
  virtual ~Rail() = default;  // flushes: after it nothing touches registered memory
  virtual const Capabilities& capabilities() const = 0;
  virtual RailInfo info() const = 0;
  virtual std::string address() const = 0;  // bounded by 512 bytes; what a peer's connect() needs

  virtual GpuRail* gpu() { return nullptr; }      // what only the rail of a GPU can do
  virtual std::string why() const { return {}; }  // [control] why the last [control] call refused, a sentence or ""

  // [control] `key`: of all rights that the memory is registered with.
  virtual Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) = 0;
  // [control], or any thread where the rail has concurrent_control: a key of a narrower scope, which ends with the others. The same scope
  // has the same key until then. kUnsupported: the rail cannot enforce it. kBusy: old keys are being revoked.
  virtual Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) = 0;
  // Old keys are dead when revoke_memory returns. These two may answer kDrainTimeout when their patience is over, and the memory stays
  // pinned: called again they go on with the same wait.
  virtual Status revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) = 0;
  virtual Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) = 0;
  virtual Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) = 0;
  // The bytes of a key may be hostile. kBusy: the owner has not shown the memory yet; the next call with the same `out` goes on.
  virtual Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                        std::unique_ptr<RemoteMemory>* out) = 0;

  // [engine lock] Flushes: each outstanding request to the peer is reported as failed and touches nothing any more (kOk), or
  // kUnsupported: the rail cannot promise that, and the requests stay outstanding until the transport reports them.
  virtual Status disconnect(RailPeer& peer) = 0;
  // [engine lock] What this connection of a peer's rail still brings is not reported any more, whatever its sender does: the engine has
  // lost the peer, which may live.
  virtual void shut_out(uint64_t) {}

  // Before the worker runs: from here on a connection of a peer's rail brings messages only, until it is admitted. kUnsupported: the rail
  // does not name the connections of its messages.
  virtual Status require_admission() { return StatusCode::kUnsupported; }
  // [engine lock] From here on this one brings all. False: the rail does not know it (any more).
  virtual bool admit(uint64_t) { return true; }
  // [engine lock] Its peer is forgotten.
  virtual void dismiss(uint64_t) {}

  // [engine lock]
  virtual PostResult post(std::span<const WorkRequest> requests) = 0;
  virtual size_t poll(std::span<RailEvent> events) = 0;
  virtual int wait_fd() const = 0;  // -1: none, the worker sleeps in short naps
  virtual bool prepare_wait() = 0;  // arm wait_fd; false: there is work, do not sleep
  virtual void cancel_wait() = 0;   // awake again
};

// Opens the rail named by `spec`; `detail` is the reason, in a sentence. Called on the opening thread before the worker runs.
using OpenRail = Status (*)(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

}  // namespace asyncfabric
