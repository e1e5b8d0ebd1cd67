// rail.h: the rail over libibverbs. Rooms: control.cc (opening, memory, connecting), post.cc (requests to doorbells), poll.cc
// (completions, immediates, messages, sleeping), recovery.cc (broken lanes, ends of connections), news.cc (what the service thread reports),
// silence.cc (devices that report nothing, ports that came back).
// Control calls may overlap the lock's holder: they touch only registrations, which the library locks, and the letter boxes.
//
// Lanes: data goes over the bulk queue pair, messages and empty signals over the other one, so that a count does not wait behind
// 100 MB. `ordered` therefore holds for what carries data: an immediate that travels with bytes comes behind all earlier bytes, an
// empty signal may overtake them. The engine sends an empty one only for what is complete already (its fenced counts).
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "provider/provider.h"
#include "providers/verbs/device/device.h"
#include "providers/verbs/memory/memory.h"
#include "providers/verbs/peers/connection.h"
#include "providers/verbs/peers/exchange.h"
#include "providers/verbs/transfers/event_queue.h"
#include "providers/verbs/transfers/queues.h"

namespace asyncfabric::verbs {

// Counted, not timed. Written under the engine lock.
struct Figures {
  uint64_t work_requests = 0;
  uint64_t doorbells = 0;
  uint64_t completions = 0;
  uint64_t receive_posts = 0;
  uint64_t rebuilt_lanes = 0;
  uint64_t silent_lanes = 0;  // whose device reported nothing for too long
};

class VerbsRail final : public Rail {
 public:
  static Status open(const Library& library, const Options& options, std::unique_ptr<Rail>* out, std::string* detail);
  ~VerbsRail() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  RailInfo info() const override;
  std::string address() const override;

  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override;
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override;
  Status revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) override;
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) override;
  Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) override;
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override;
  Status disconnect(RailPeer& peer) override;
  void shut_out(uint64_t connection) override;
  Status require_admission() override {
    asks_admission_ = true;
    return {};
  }
  bool admit(uint64_t connection) override {
    admitted_.insert(connection);
    return true;
  }
  void dismiss(uint64_t connection) override { admitted_.erase(connection); }

  PostResult post(std::span<const WorkRequest> requests) override;
  size_t poll(std::span<RailEvent> events) override;
  int wait_fd() const override { return wait_.get(); }
  bool prepare_wait() override;
  void cancel_wait() override;

  Figures figures() const;

 private:
  static constexpr size_t kMaxChain = 64;

  // Requests of one lane that go out with one doorbell.
  struct Chain {
    Lane* lane = nullptr;
    Connection* connection = nullptr;
    size_t count = 0;
    std::array<ibv_send_wr, kMaxChain> requests{};
    std::array<ibv_sge, kMaxChain> pieces{};
  };
  // The receiving end of a peer's lane.
  struct Incoming {
    ibv_qp* qp = nullptr;
    uint64_t id = 0;     // of the peer's connection
    uint32_t taken = 0;  // messages whose receive is posted again
    uint32_t reported = 0;
    uint32_t window = 0;
    uint32_t under_way = 0;  // credits that have not left
  };

  explicit VerbsRail(std::shared_ptr<Device> device);
  Status make(std::string* detail);
  bool watch(int fd) const;

  // post.cc
  Status check(const WorkRequest& request) const;
  Lane& lane_for(Connection& connection, const WorkRequest& request) const;
  bool has_room(const Lane& lane) const { return lane.has_room() && in_device_ + stale_ < queues_->most_in_device; }
  ibv_send_wr& append(Connection& connection, Lane& lane, const Record& record);
  Status number_of(Connection& connection, const WorkRequest& request, uint32_t* rkey);
  void post_work(Connection& connection, Lane& lane, const WorkRequest& request, uint32_t rkey);
  bool take_message(Connection& connection, const WorkRequest& request);
  void post_message(Connection& connection, const WaitingMessage& message);
  void advance_waiting();
  void ring_doorbell();
  uint8_t* send_bytes(uint32_t slot) const { return send_block_->bytes + size_t{slot} * kSlotBytes; }

  // poll.cc
  size_t read_cq();
  void take(const ibv_wc& work);
  void take_message_receive(const ibv_wc& work);
  void take_credit(const ibv_wc& work);
  bool is_shut_out(uint32_t qpn) const { return !shut_out_.empty() && shut_out_.contains(qpn); }
  bool may_count(uint32_t qpn) const;
  void give_credits(Incoming& incoming);
  void give_slots_back();
  void emit_done(uint64_t tag, Status status);
  void emit_immediate(uint32_t imm);
  void end_records(Lane& lane, uint32_t until, Status status);

  // recovery.cc
  void complete(Connection& connection, Lane& lane, uint32_t position, ibv_wc_status status);
  void flushed(Connection& connection, Lane& lane, uint32_t until);
  void break_lane(Connection& connection, Lane& lane, Status status, bool peer_silent);
  void keep_message(Connection& connection, Record& record);
  void pass_verdict(Connection& connection, Lane& lane, Status status);
  void pass_verdicts(Status status);
  void report_path(Connection& connection, bool down);
  void look_at_verdicts();
  void take_news();
  void take_ready(News& news);
  void take_given_up(Connection& connection, Status status);
  void take_port_down(Status status);
  void take_port_up();
  void take_device_failed(Status status);
  void take_device_open(News& news);
  void take_moved(Connection& connection);
  void leave_device(Connection& connection, Status status);
  void close(Connection& connection, Status status);
  void post_credit_receive(ibv_qp* qp) const;
  uint32_t table_slot(const std::shared_ptr<Connection>& connection);

  // silence.cc
  void look_for_silence();
  static bool grows_silent(const Connection& connection, Lane& lane, uint64_t gap);
  void push_out(Connection& connection, Lane& lane);
  void take_out(Connection& connection, Lane& lane);
  void ask_path(Connection& connection);
  void path_answers(Connection& connection);

  std::shared_ptr<Device> device_;
  std::shared_ptr<Handover> handover_;
  Capabilities capabilities_;
  std::shared_ptr<Registry> registry_;
  std::shared_ptr<Queues> queues_;  // none while the device has failed
  const bool ethernet_;
  UniqueFd wait_;                                          // epoll set of their channel and the news
  std::vector<std::shared_ptr<ReceiveBlock>> old_blocks_;  // of an earlier life, which messages in events_ lie in
  std::shared_ptr<ReceiveBlock> send_block_;               // copies of messages under way
  std::vector<uint32_t> free_sends_;
  std::unique_ptr<Exchange> exchange_;
  RailAddress address_;                // engine lock
  std::atomic<uint32_t> openings_{1};  // partner: the lock's holder stores, info() loads

  std::vector<std::shared_ptr<Connection>> table_;  // by the slot number in work-request ids
  std::vector<uint8_t> generations_;                // newest of each slot
  std::vector<uint32_t> free_slots_;
  std::unordered_map<uint32_t, Connection*> by_credit_qpn_;
  std::unordered_map<uint32_t, Incoming> incoming_;
  std::unordered_set<uint32_t> shut_out_;  // of those, until they are gone
  std::unordered_set<uint64_t> admitted_;  // connections of peers that have proven the secret
  bool asks_admission_ = false;
  std::vector<Connection*> waiting_;
  std::vector<std::pair<Connection*, Lane*>> awaiting_;  // their failed requests wait for the peer's sign of life
  Chain chain_;
  EventQueue events_;
  std::vector<EventQueue::Item> handed_out_;  // messages of the last poll
  uint32_t in_device_ = 0;                    // requests in all send queues: each may become a completion
  uint32_t stale_ = 0;                        // completions of destroyed queue pairs that may still stand in the CQ
  unsigned unacked_events_ = 0;
  uint64_t looked_ns_ = 0;  // last look for silence
  uint64_t next_look_ns_ = 0;
  bool port_down_ = false;
  Figures figures_;
};

}  // namespace asyncfabric::verbs
