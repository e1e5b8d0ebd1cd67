// native_engine.h: the Engine of engine.h over a Core and its worker. Submission and look-ups run on the caller's thread and touch
// only what Core marks for any thread; the rest goes through the mailbox or takes the engine lock for a moment.
#pragma once

#include <atomic>

#include "asyncfabric/engine.h"
#include "engine/core.h"
#include "engine/loop/loop_turn.h"
#include "engine/loop/worker.h"

namespace asyncfabric {

class NativeEngine final : public Engine {
 public:
  explicit NativeEngine(const EngineConfig& config) : core_(config), worker_(core_) {}
  ~NativeEngine() override;
  Status start(std::string* detail);

  std::string address() const override { return core_.address(); }
  uint64_t incarnation() const override { return core_.incarnation; }
  std::vector<RailInfo> rails() const override;
  std::vector<LeftOutRail> rails_left_out() const override { return core_.left_out; }
  std::vector<PeerInfo> peers() const override;
  EngineStatistics statistics() const override;
  OpProgress progress(OpId op) const override;
  std::string last_error() const override;
  std::string reason(uint64_t cookie) const override;

  Status submit_register(uint64_t cookie, void* base, uint64_t length, int32_t device, uint32_t access) override;
  Status submit_allocate(uint64_t cookie, uint64_t length, int32_t device, uint32_t access) override;
  Status submit_revoke(uint64_t cookie, RegionId region) override;
  Status submit_release(uint64_t cookie, RegionId region) override;
  Status submit_connect(uint64_t cookie, std::string_view address) override;
  Status submit_disconnect(uint64_t cookie, PeerId peer) override;
  Status submit_close(uint64_t cookie, bool cancel_unposted) override;

  Status region_info(RegionId region, RegionInfo* out) const override;
  Status region_key(RegionId region, uint32_t access, uint64_t offset, uint64_t length, bool strict,
                    std::string* out) const override;
  Status open_key(std::string_view bytes, KeyId* out, KeyInfo* info) override;
  void close_key(KeyId key) override;
  PeerId peer_of_key(KeyId key) const override;
  std::shared_ptr<uint8_t> key_memory(KeyId key, uint64_t* length) const override;

  Status submit_write(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                      uint64_t target_offset, int64_t imm, OpId* op, MarkId after) override;
  Status submit_read(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                     uint64_t target_offset, OpId* op) override;
  Status submit_write_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& pages, int64_t imm, OpId* op,
                            MarkId after) override;
  Status submit_read_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& pages, OpId* op) override;
  Status submit_write_boxes(uint64_t cookie, RegionId region, KeyId key, const BoxBatch& boxes, int64_t imm,
                            OpId* op) override;
  Status mark_stream(void* stream, int32_t device, MarkId* out) override;
  Status mark_word(WatchId watch, uint64_t value, MarkId* out) override;
  void drop_mark(MarkId mark) override;
  Status submit_scatter(uint64_t cookie, RegionId region, const ScatterTarget* targets, size_t count, int64_t imm,
                        OpId* op) override;
  Status submit_signal(uint64_t cookie, const PeerId* peers, size_t count, int64_t imm, OpId* op) override;
  Status submit_send(uint64_t cookie, PeerId peer, const void* payload, size_t length, OpId* op) override;
  Status cancel(OpId op) override;
  Status arm_writable(uint64_t cookie) override;

  Status open_counter(int64_t imm, CounterId* out, uint32_t* imm_out) override;
  void close_counter(CounterId counter) override;
  Status arm_closed(uint64_t cookie, uint32_t imm) override;
  std::vector<ClosingInfo> closings(int64_t imm) const override;
  uint64_t counter_value(CounterId counter) const override { return core_.counters.value(counter); }
  Status arm_counter(CounterId counter, uint64_t cookie, uint64_t target) override;
  Status spin_counter(CounterId counter, uint64_t target, uint64_t deadline_ns, uint64_t* value) override;
  Status counter_flag(CounterId counter, uint64_t** word) override;
  Status stream_wait(CounterId counter, void* stream, int32_t device, uint64_t target) override;
  Status open_watch(WatchId* out, uint64_t** word) override { return core_.watches.open(out, word); }
  Status arm_watch(WatchId watch, uint64_t cookie, uint64_t seen) override;
  void close_watch(WatchId watch) override { core_.watches.close(watch); }
  void notify() override { core_.gate.notify(); }

  int completion_fd() const override { return core_.rail_watch.loop_fd(); }
  bool arm() override;
  void disarm() override;
  size_t poll(Completion* out, size_t capacity) override;
  void assist() override;
  bool look() override;
  void take_messages(size_t capacity, std::vector<ReceivedMessage>* out) override;
  Status spin_messages(size_t capacity, uint64_t deadline_ns, std::vector<ReceivedMessage>* out) override;
  void set_trace(bool on) override { core_.trace.enable(on); }
  std::vector<TraceEvent> take_trace() const override { return core_.trace.snapshot(); }
  size_t step() override;

 private:
  // engine.cc
  Status open_state(const RailSpec& spec, RailState* state, std::string* detail) const;

  // submit.cc
  Status take_op(OpKind kind, uint64_t cookie, int64_t imm, Op** out);
  Status use_region(Op& op, RegionId region, uint64_t offset, uint64_t length);
  Status use_key(Op& op, KeyId key, uint64_t offset, uint64_t length, uint32_t right, Target* target);
  MarkId keep_mark(std::unique_ptr<StreamMark> mark);
  Status submit_pages(OpKind kind, uint64_t cookie, RegionId region, KeyId key, const PageBatch& batch, int64_t imm,
                      OpId* id, MarkId after);
  Status submit_range(OpKind kind, uint64_t cookie, RegionId region, KeyId key, Target target, int64_t imm, OpId* id,
                      MarkId after = 0);
  std::unique_ptr<StreamMark> take_mark(MarkId after);
  uint32_t rail_of_device(int32_t device) const;  // it has a gpu(); the number of rails: there is none
  void give_back(Op& op);
  void send(Op& op, uint64_t bytes, OpId* id);
  void wake_worker(uint64_t bytes);

  template <class Reached, class Open>
  Status spin(uint64_t deadline_ns, Reached reached, Open open);

  // loop_calls.cc
  bool has_completions() const;
  size_t serve_rails(bool* quiet);
  bool linger();
  bool watch_ring();

  // control_calls.cc
  void add_region(uint64_t cookie, Pages pages, std::unique_ptr<DeviceMemory> device_pages, void* base, uint64_t length,
                  int32_t device, uint32_t access);
  void allocate_device(uint64_t cookie, uint64_t length, int32_t device, uint32_t access);
  Status rail_keys_of(RegionEntry& entry, const KeyScope& scope, std::vector<std::string>* keys,
                      uint64_t* generation) const;
  void close_behind_waits(uint64_t cookie, bool again, bool cancel_unposted);
  std::string reason(uint32_t rail, int32_t device) const;
  std::atomic<uint32_t>* nic_regions_of(int32_t device, uint32_t access) const;
  void answer(uint64_t cookie, Status status, uint64_t value);

  mutable Core core_;  // look-ups pin and unpin
  Worker worker_;
  LoopTurn turn_;          // event loop
  uint64_t armed_ns_ = 0;  // event loop
  std::atomic<uint64_t> regions_{0};
  std::atomic<uint64_t> registered_bytes_{0};
};

}  // namespace asyncfabric
