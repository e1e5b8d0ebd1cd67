// engine.h: all that Cython may see of the native engine.
// Submissions may come from any thread and never block; they fail only with kBusy, kClosed or a bad argument.
// Everything else arrives as a Completion, taken by one consumer thread at a time: the event loop, or of threads the one that leads.
// The worker thread, or a caller thread that holds the engine lock, runs step(); no call here needs the GIL.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "asyncfabric/types.h"

namespace asyncfabric {

// Pages of an allocated region of the host, mapped once more; munmap ends it. Null, and errno: the engine did not allocate them.
void* alias_pages(void* base, uint64_t length);

// A counter that is closed, and the peers that have not confirmed it.
struct ClosingInfo {
  uint32_t imm = 0;
  uint64_t age_ns = 0;
  std::vector<PeerId> peers;
};

class Engine {
 public:
  // `detail` gets a sentence for people when opening fails (which rail, which library, which errno).
  static Status open(const EngineConfig& config, std::unique_ptr<Engine>* out, std::string* detail);
  virtual ~Engine() =
      default;  // closes at once if submit_close was not awaited; joins its threads, never needs the GIL

  virtual std::string address() const = 0;  // FabricAddress bytes
  virtual uint64_t incarnation() const = 0;
  virtual std::vector<RailInfo> rails() const = 0;
  virtual std::vector<LeftOutRail> rails_left_out() const = 0;  // optional ones that could not be opened
  virtual std::vector<PeerInfo> peers() const = 0;
  virtual EngineStatistics statistics() const = 0;
  virtual OpProgress progress(OpId op) const = 0;
  virtual std::string last_error() const = 0;  // newest detail text of a failed control call
  // Why a data call ended badly, where more is known than its status; of the newest 64 such calls.
  virtual std::string reason(uint64_t cookie) const = 0;

  // Control calls: run on the control thread, end as CompletionKind::kControl with `value` = the new id.
  virtual Status submit_register(uint64_t cookie, void* base, uint64_t length, int32_t device, uint32_t access) = 0;
  virtual Status submit_allocate(uint64_t cookie, uint64_t length, int32_t device, uint32_t access) = 0;
  virtual Status submit_revoke(uint64_t cookie, RegionId region) = 0;   // new generation once no old-key write can land
  virtual Status submit_release(uint64_t cookie, RegionId region) = 0;  // ends when nothing can touch the memory
  virtual Status submit_connect(uint64_t cookie, std::string_view address) = 0;
  virtual Status submit_disconnect(uint64_t cookie, PeerId peer) = 0;
  // Drains, then kClosed. What has not begun to leave drain_deadline later ends: cancelled, or kNotTaken with `value` messages that the
  // peer had no room for. Called again with cancel_unposted it stops what is unposted at once; the first cookie is the one that ends.
  virtual Status submit_close(uint64_t cookie, bool cancel_unposted) = 0;

  // Look-ups, synchronous.
  virtual Status region_info(RegionId region, RegionInfo* out) const = 0;
  // Of a strict key the rails themselves enforce the range; of others its user's engine does. kBusy: the region is being revoked;
  // kUnsupported: no rail can enforce that range.
  virtual Status region_key(RegionId region, uint32_t access, uint64_t offset, uint64_t length, bool strict,
                            std::string* out) const = 0;
  virtual Status open_key(std::string_view bytes, KeyId* out,
                          KeyInfo* info) = 0;  // parses and bounds-checks hostile bytes
  virtual void close_key(KeyId key) = 0;
  virtual PeerId peer_of_key(KeyId key) const = 0;  // 0 while its next use would connect
  // The key's memory where this process has it mapped and the key permits writing, for as long as the pointer is held. Null: a rail of
  // another kind reaches it, or the key was not used yet. What is stored there is seen by whoever sees an immediate of a later op.
  virtual std::shared_ptr<uint8_t> key_memory(KeyId key, uint64_t* length) const = 0;
  static Status check_address(std::string_view bytes, uint64_t* incarnation);  // parse only

  // What a CUDA stream was given so far. One write may name it as `after`: its bytes leave when the stream is past it.
  virtual Status mark_stream(void* stream, int32_t device, MarkId* out) = 0;
  // The same for a watch word: the bytes leave when it holds `value` or more. Nobody but the worker has to wake for it.
  virtual Status mark_word(WatchId watch, uint64_t value, MarkId* out) = 0;
  // A write that was refused as kBusy leaves its mark for another try; who gives up takes it back.
  virtual void drop_mark(MarkId mark) = 0;

  // Data ops. `imm` is kNoImm or 0..kMaxImm. Bounds are checked here, locally and against the key.
  virtual Status submit_write(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                              uint64_t target_offset, int64_t imm, OpId* op, MarkId after = 0) = 0;
  virtual Status submit_read(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                             uint64_t target_offset, OpId* op) = 0;
  virtual Status submit_write_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& pages, int64_t imm,
                                    OpId* op, MarkId after = 0) = 0;
  // Sources lie behind the key, targets in the region.
  virtual Status submit_read_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& pages, OpId* op) = 0;
  // kUnsupported: a rail of this engine cannot gather.
  virtual Status submit_write_boxes(uint64_t cookie, RegionId region, KeyId key, const BoxBatch& boxes, int64_t imm,
                                    OpId* op) = 0;
  virtual Status submit_scatter(uint64_t cookie, RegionId region, const ScatterTarget* targets, size_t count,
                                int64_t imm, OpId* op) = 0;
  virtual Status submit_signal(uint64_t cookie, const PeerId* peers, size_t count, int64_t imm, OpId* op) = 0;
  virtual Status submit_send(uint64_t cookie, PeerId peer, const void* payload, size_t length, OpId* op) = 0;
  virtual Status cancel(OpId op) = 0;                // stop posting, drain, complete as kCancelled
  virtual Status arm_writable(uint64_t cookie) = 0;  // one kWritable completion when a slot is free

  // Counters. `imm` = kNoImm lets the engine pick a free one. kUnconfirmed: it had a counter before, and some peer may still have work under
  // way that counts for that one. Never waits.
  virtual Status open_counter(int64_t imm, CounterId* out, uint32_t* imm_out) = 0;
  virtual void close_counter(CounterId counter) = 0;
  virtual Status arm_closed(uint64_t cookie, uint32_t imm) = 0;  // one kControl completion when it is not kUnconfirmed
  virtual std::vector<ClosingInfo> closings(int64_t imm) const = 0;  // those that are, at most 64; kNoImm: of any imm
  virtual uint64_t counter_value(CounterId counter) const = 0;
  virtual Status arm_counter(CounterId counter, uint64_t cookie, uint64_t target) = 0;  // replaces an earlier arming
  virtual Status spin_counter(CounterId counter, uint64_t target, uint64_t deadline_ns, uint64_t* value) = 0;

  // A word that kernels may spin on, at its own address: never less than the value once that has been seen, and the largest
  // positive number when the counter is closed. kBusy: too many counters have one.
  virtual Status counter_flag(CounterId counter, uint64_t** word) = 0;
  virtual Status stream_wait(CounterId counter, void* stream, int32_t device, uint64_t target) = 0;

  // Watch words: 64-bit words that any thread or GPU kernel may store to.
  virtual Status open_watch(WatchId* out, uint64_t** word) = 0;
  virtual Status arm_watch(WatchId watch, uint64_t cookie, uint64_t seen) = 0;  // completes when *word != seen
  virtual void close_watch(WatchId watch) = 0;
  virtual void notify() = 0;  // wakes a sleeping worker, after a CPU thread stored to a watch word

  // Completions: one consumer.
  virtual int completion_fd() const = 0;                      // readable when armed and something came
  virtual bool arm() = 0;                                     // false: completions are already there, do not sleep
  virtual void disarm() = 0;                                  // after a wake-up: empties the fd
  virtual size_t poll(Completion* out, size_t capacity) = 0;  // never blocks
  // Any thread that polls: brings on what is under way, so that what it polls for needs no other thread to be scheduled.
  virtual void assist() = 0;
  // Whether completions are there for poll(); while there are none, assists first.
  virtual bool look() = 0;

  // Two-sided messages, any thread: appends up to `capacity` that are here, in the order of each sender. Never waits.
  virtual void take_messages(size_t capacity, std::vector<ReceivedMessage>* out) = 0;
  // The same once there is one; spins until then. kTimeout, kClosed: there was none.
  virtual Status spin_messages(size_t capacity, uint64_t deadline_ns, std::vector<ReceivedMessage>* out) = 0;

  // Trace: off by default; take_trace returns the newest events, oldest first.
  virtual void set_trace(bool on) = 0;
  virtual std::vector<TraceEvent> take_trace() const = 0;

  // Manual polling: one pass of the engine; returns how many things happened.
  virtual size_t step() = 0;
};

}  // namespace asyncfabric
