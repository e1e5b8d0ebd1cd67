// fault_rail.h: a rail that passes everything on to an inner rail, except where its FaultPlan asks otherwise.
// Handles (memory, peers) are those of the inner rail. Held requests are kept here until poll() releases them, so a fault
// rail moves data only while it is polled, and prepare_wait() refuses sleep while something is held.
// What the inner rail already has is reported as the inner rail reports it: a fault never reports a request that may still move.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "providers/fault/fault_plan.h"

namespace asyncfabric {

class FaultRail final : public Rail {
 public:
  FaultRail(const FaultPlan& plan, std::unique_ptr<Rail> inner);

  const Capabilities& capabilities() const override { return capabilities_; }
  RailInfo info() const override;
  std::string address() const override { return inner_->address(); }

  GpuRail* gpu() override { return inner_->gpu(); }
  std::string why() const override { return inner_->why(); }

  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override;
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override;
  Status revoke_memory(LocalMemory& memory, uint64_t deadline_ns, std::string* new_key) override;
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t deadline_ns) override;
  Status connect(std::string_view address, uint64_t deadline_ns, std::unique_ptr<RailPeer>* out) override;
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override;
  Status disconnect(RailPeer& peer) override;
  void shut_out(uint64_t connection) override { inner_->shut_out(connection); }
  Status require_admission() override { return inner_->require_admission(); }
  bool admit(uint64_t connection) override { return inner_->admit(connection); }
  void dismiss(uint64_t connection) override { inner_->dismiss(connection); }

  PostResult post(std::span<const WorkRequest> requests) override;
  size_t poll(std::span<RailEvent> events) override;
  int wait_fd() const override { return inner_->wait_fd(); }
  bool prepare_wait() override;
  void cancel_wait() override { inner_->cancel_wait(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kMessageTurns = 64;
  struct Held {
    WorkRequest request;
    Clock::time_point due;
  };

  Status post_message(const WorkRequest& request);
  Status accept(const WorkRequest& request);
  bool dead() const { return plan_.dead_peer_after != 0 && count_ >= plan_.dead_peer_after; }
  bool hangs(uint64_t number) const { return plan_.hang != 0 && number >= plan_.hang; }
  void go_down();
  void come_up_when_due();
  void release_due();
  bool release_one(size_t index);
  void fail(const WorkRequest& request, Status status);
  size_t take_inner(std::span<RailEvent> events);

  const FaultPlan plan_;
  const std::unique_ptr<Rail> inner_;
  Capabilities capabilities_;
  std::mt19937_64 random_;
  uint64_t count_ = 0;           // requests accepted
  uint64_t messages_ = 0;        // messages asked to send
  uint64_t registrations_ = 0;   // [control] only
  uint64_t refused_number_ = 0;  // the request that was refused with kBusy already
  // Polls that release nothing, after the inner rail had no room for a message: held requests fill each gap at once, and
  // would keep heartbeats out for as long as there are any.
  uint32_t message_turns_ = 0;
  bool down_ = false;
  bool went_down_ = false;
  Clock::time_point up_at_{};
  Clock::time_point next_read_{};
  std::deque<Held> held_;             // to be released to the inner rail
  std::vector<WorkRequest> limbo_;    // never released: dead peer or hang
  std::deque<RailEvent> own_events_;  // failures and rail state; never messages
};

}  // namespace asyncfabric
