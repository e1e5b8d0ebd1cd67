// rail.h: the rail over libfabric. Four files: control.cc (memory, peers), post.cc, poll.cc (completions, immediates, messages,
// waiting) and fence.cc (waiting until no peer can be half-way through a write). [control] and [engine lock] calls never overlap
// (concurrent_control is false), which is what FI_THREAD_DOMAIN asks for.
#pragma once

#include <bitset>
#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "provider/provider.h"
#include "providers/libfabric/device/device.h"
#include "providers/libfabric/memory/memory.h"
#include "providers/libfabric/peers/admitted.h"
#include "providers/libfabric/peers/half_open.h"
#include "providers/libfabric/peers/inbound.h"
#include "providers/libfabric/peers/peer.h"
#include "providers/libfabric/peers/shut_out.h"
#include "providers/libfabric/transfers/contexts.h"
#include "providers/libfabric/transfers/messages.h"

namespace asyncfabric::libfabric {

struct PostLimits {
  uint32_t eager_posts = 0;     // per post(); 0: no bound
  uint32_t posts_per_pass = 0;  // per poll(); 0: no bound
};

class LibfabricRail final : public Rail {
 public:
  static Status open(const Library& library, const Profile& profile, Info info, PostLimits post_limits,
                     std::unique_ptr<Rail>* out, std::string* detail);
  ~LibfabricRail() override;

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
  void shut_out(uint64_t connection) override { shut_out_.add(connection); }
  Status require_admission() override;
  bool admit(uint64_t connection) override;
  void dismiss(uint64_t connection) override { admitted_.remove(connection); }

  PostResult post(std::span<const WorkRequest> requests) override;
  size_t poll(std::span<RailEvent> events) override;
  int wait_fd() const override { return device_->wait_fd(); }
  bool prepare_wait() override;
  void cancel_wait() override {}  // the next fi_cq_read and fi_trywait drain what made the fd readable

 private:
  static constexpr size_t kBatch = 128;

  struct Stashed {
    RailEvent event;
    ReceiveSlot* slot = nullptr;
    std::unique_ptr<uint8_t[]> copy;  // of the message; then no slot
  };

  LibfabricRail(std::shared_ptr<Device> device, PostLimits post_limits);
  RailAddress own_address() const;

  // control.cc
  Status open_peer(const RailAddress& remote, std::shared_ptr<PeerState>* out);
  Status open_own_endpoint(PeerState& peer);
  void settle();
  bool flush(PeerState& peer);
  void forget_finished_peers();

  // post.cc
  Status check(const WorkRequest& request) const;
  std::bitset<kBatch> last_of_each_peer(std::span<const WorkRequest> batch);
  bool leaves_question(const WorkRequest& request) const;
  size_t post_batch(std::span<const WorkRequest> batch);
  void cover_later() { cover_wanted_ = device_->profile().acknowledged; }
  void cover();
  bool stream_vanished(const PeerState& peer) const;
  void knock(PeerState& peer);
  Context* enlist(PeerState& peer, const WorkRequest& request, bool internal);
  bool has_room(const PeerState& peer, const Context& context) const;
  ssize_t submit(Context& context, const WorkRequest& request);
  ssize_t submit_send(Context& context, size_t bytes);
  ssize_t submit_write(Context& context, const WorkRequest& request);
  Status send_control(PeerState& peer, MessageKind kind, uint64_t number, std::string_view body, bool barrier);
  void push_backlog(PeerState& peer, Context& context, const WorkRequest& request);
  void advance_backlogs();
  void advance_backlog(PeerState& peer, uint32_t* budget);

  // poll.cc
  void finish(Context& context, Status status);
  void retire(Context& context);
  bool reportable(const Context& context) const;
  void break_stream(PeerState& peer, Status status);
  void end_doubt(PeerState& peer, Status verdict);
  void look_into_doubts();
  void rebuild_broken();
  void rebuild(PeerState& peer);
  void emit(const RailEvent& event, ReceiveSlot* slot);
  size_t read_cq(size_t limit);
  void take_entry(const fi_cq_data_entry& entry);
  void take_immediate(uint64_t data);
  void take_error();
  Status diagnose(PeerState& peer, int error);
  void lose(PeerState& peer);
  void take_message(ReceiveSlot* slot, size_t length);
  void progress_into_stash();
  bool end_half_open(bool sleeps);

  // fence.cc
  Status introduce(PeerState& peer);
  Status send_answer(PeerState& peer, uint64_t number);
  void name_stream(Context& context);
  Status fence(uint64_t patience_ns, uint64_t* number);  // 0: a new one; it is kept for the next call otherwise
  void enter_inbound(uint64_t connection, RailAddress sender);
  void take_control_message(const MessageHead& head, std::string_view body);
  bool only_answered_streams_left(uint64_t wanted, std::chrono::steady_clock::time_point now);
  bool ask(InboundList::One& inbound);
  bool refuses_connections(const RailAddress& address) const;
  bool nobody_listens(const RailAddress& address) const;
  PeerState* path_to(const RailAddress& address);
  bool is_dead(const RailAddress& sender);
  bool has_spare_paths() const { return any_spare_ || !silent_.empty(); }
  void close_spare_paths();

  std::shared_ptr<Device> device_;
  Capabilities capabilities_;
  PostLimits post_limits_;
  std::unique_ptr<ContextPool> contexts_;
  std::unique_ptr<MessageBuffers> buffers_;
  std::vector<std::shared_ptr<PeerState>> peers_;
  std::vector<PeerState*> backlogged_;
  std::deque<Stashed> stash_;             // events without room; empty in the steady state
  std::vector<ReceiveSlot*> handed_out_;  // messages of the last poll
  std::vector<std::unique_ptr<uint8_t[]>> copies_handed_out_;
  std::span<RailEvent> room_;  // of the poll that runs
  size_t filled_ = 0;
  uint32_t post_mark_ = 0;
  uint32_t unmet_sends_ = 0;  // messages to peers that have not taken anything yet
  bool cover_wanted_ = false;
  bool any_broken_ = false;
  size_t doubts_ = 0;  // peers whose stream broke and that may be dead
  InboundList inbound_;
  Admitted admitted_;
  ShutOut shut_out_;
  HalfOpen half_open_;
  bool names_connections_ = false;          // immediates have room for the tag of theirs
  std::unordered_set<std::string> silent_;  // names of senders without an answer: dead, or they have no stream left
  bool any_spare_ = false;  // a connection of the rail's own carries nothing any more, or there is one less to be asked
  uint64_t fence_number_ = 0;
  std::chrono::steady_clock::time_point next_probe_;  // of the fence that waits
};

}  // namespace asyncfabric::libfabric
