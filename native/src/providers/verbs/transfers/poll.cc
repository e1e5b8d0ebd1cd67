// poll.cc: what came back from the device: completions, immediates, messages, credits; and when the worker may sleep.
#include <arpa/inet.h>

#include <algorithm>
#include <array>

#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr size_t kReadAtOnce = 32;
constexpr unsigned kAckAtOnce = 256;  // acknowledging takes a lock

}  // namespace

void VerbsRail::emit_done(uint64_t tag, Status status) {
  RailEvent event;
  event.kind = RailEventKind::kDone;
  event.status = status;
  event.tag = tag;
  events_.push({event});
}

void VerbsRail::emit_immediate(uint32_t imm) {
  RailEvent event;
  event.kind = RailEventKind::kImmediate;
  event.imm = imm;
  events_.push({event});
}

// Reports [head, until) and gives back what they held.
void VerbsRail::end_records(Lane& lane, uint32_t until, Status status) {
  for (; lane.head != until; ++lane.head) {
    Record& record = lane.at(lane.head);
    if (record.kept) continue;
    if (!record.quiet || !status.ok()) emit_done(record.tag, status);
    if (record.send_slot != kNoSlot) free_sends_.push_back(record.send_slot);
  }
}

size_t VerbsRail::poll(std::span<RailEvent> events) {
  give_slots_back();
  if (!old_blocks_.empty() && events_.empty()) old_blocks_.clear();
  if (handover_->has_news()) take_news();
  if (!awaiting_.empty()) look_at_verdicts();
  if (queues_) {
    while (events_.size() < events.size() && read_cq() == kReadAtOnce) {}
    if (in_device_ != 0 || !waiting_.empty()) look_for_silence();
    if (queues_) queues_->receives->refill(false);
    advance_waiting();
  }
  size_t count = 0;
  for (; count < events.size() && !events_.empty(); ++count) {
    const EventQueue::Item item = events_.pop();
    events[count] = item.event;
    if (item.event.kind == RailEventKind::kMessage) handed_out_.push_back(item);
  }
  return count;
}

size_t VerbsRail::read_cq() {
  std::array<ibv_wc, kReadAtOnce> work;
  const int count = ibv_poll_cq(queues_->cq.get(), static_cast<int>(work.size()), work.data());
  if (count < static_cast<int>(work.size())) stale_ = 0;
  if (count <= 0) return 0;
  if (handover_->has_news()) take_news();  // who these came from was reported before they could come
  if (!queues_) return 0;                  // ... and that their device failed: their requests have ended
  figures_.completions += static_cast<uint64_t>(count);
  for (int i = 0; i < count; ++i) take(work[static_cast<size_t>(i)]);
  return static_cast<size_t>(count);
}

void VerbsRail::take(const ibv_wc& work) {
  switch (kind_of(work.wr_id)) {
    case Kind::kSend: {
      const auto slot = static_cast<uint32_t>(work.wr_id >> 32 & 0x7ffff);
      Connection* connection = slot < table_.size() ? table_[slot].get() : nullptr;
      if (connection == nullptr) return;
      Lane& lane = connection->lanes[work.wr_id >> 59 & 1];
      if (lane.generation != static_cast<uint8_t>(work.wr_id >> 51)) return;  // of a queue pair that is gone
      complete(*connection, lane, static_cast<uint32_t>(work.wr_id), work.status);
      return;
    }
    case Kind::kCount:
      queues_->receives->count_used();
      if (work.status == IBV_WC_SUCCESS && may_count(work.qp_num)) emit_immediate(ntohl(work.imm_data));
      return;
    case Kind::kMessage: take_message_receive(work); return;
    case Kind::kCredit: take_credit(work); return;
    case Kind::kCreditSent:
      if (const auto found = incoming_.find(work.qp_num); found != incoming_.end()) {
        --found->second.under_way;
        if (work.status == IBV_WC_SUCCESS) give_credits(found->second);
      }
      return;
  }
}

// Not shut out and, where the engine has a secret, of a peer that has proven it.
bool VerbsRail::may_count(uint32_t qpn) const {
  if (is_shut_out(qpn)) return false;
  if (!asks_admission_) return true;
  const auto from = incoming_.find(qpn);
  return from != incoming_.end() && admitted_.contains(from->second.id);
}

void VerbsRail::take_message_receive(const ibv_wc& work) {
  const auto slot = static_cast<uint32_t>(work.wr_id);
  if (work.status != IBV_WC_SUCCESS || is_shut_out(work.qp_num)) {  // its queue pair broke while it came in
    queues_->receives->repost(slot);
    return;
  }
  if (work.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    queues_->receives->repost(slot);
    if (may_count(work.qp_num)) emit_immediate(ntohl(work.imm_data));
    return;
  }
  RailEvent event;
  event.kind = RailEventKind::kMessage;
  event.data = queues_->receives->slot_bytes(slot);
  event.length = work.byte_len;
  if (const auto from = incoming_.find(work.qp_num); from != incoming_.end()) event.connection = from->second.id;
  events_.push({event, slot, work.qp_num, openings_.load(std::memory_order_relaxed)});
}

// The engine is done with the messages of the last poll.
void VerbsRail::give_slots_back() {
  for (const EventQueue::Item& item : handed_out_) {
    if (!queues_ || item.life != openings_.load(std::memory_order_relaxed)) continue;  // its slot went with the device
    queues_->receives->repost(item.receive_slot);
    const auto found = incoming_.find(item.qpn);
    if (found == incoming_.end()) continue;
    ++found->second.taken;
    give_credits(found->second);
  }
  handed_out_.clear();
}

// Reports to the sender how many of its messages were taken in all, when half of what it may have under way is owed to it. A number and not
// a difference, so a credit that could not leave now is made good by the next one.
void VerbsRail::give_credits(Incoming& incoming) {
  if (incoming.taken - incoming.reported < std::max(1u, incoming.window / 2) || incoming.under_way == kCreditSends)
    return;
  ibv_send_wr request{};
  request.wr_id = kind_bits(Kind::kCreditSent);
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data = htonl(incoming.taken);
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(incoming.qp, &request, &bad) != 0) return;
  ++incoming.under_way;
  incoming.reported = incoming.taken;
}

void VerbsRail::take_credit(const ibv_wc& work) {
  const auto found = by_credit_qpn_.find(work.qp_num);
  if (found == by_credit_qpn_.end() || work.status != IBV_WC_SUCCESS) return;
  Connection& connection = *found->second;
  const uint32_t taken = ntohl(work.imm_data);
  if (taken - connection.messages_taken <= connection.messages_sent - connection.messages_taken)
    connection.messages_taken = taken;  // more than was sent is a lie
  post_credit_receive(connection.lanes[kSignalLane].pair.qp.get());
}

void VerbsRail::post_credit_receive(ibv_qp* qp) const {
  if (qp == nullptr) return;
  ibv_recv_wr request{};
  request.wr_id = kind_bits(Kind::kCredit);
  ibv_recv_wr* bad = nullptr;
  (void)ibv_post_recv(qp, &request, &bad);
}

bool VerbsRail::prepare_wait() {
  if (!events_.empty() || !handed_out_.empty() || handover_->has_news()) return false;
  if (!queues_) return true;
  queues_->receives->refill(true);
  if (ibv_req_notify_cq(queues_->cq.get(), 0) != 0) return false;
  return read_cq() == 0;  // what came before the arming rings nobody
}

void VerbsRail::cancel_wait() {
  if (!queues_) return;
  ibv_cq* cq = nullptr;
  void* unused = nullptr;
  while (device_->library().ibv_get_cq_event(queues_->channel.get(), &cq, &unused) == 0) ++unacked_events_;
  if (unacked_events_ < kAckAtOnce) return;
  device_->library().ibv_ack_cq_events(queues_->cq.get(), std::exchange(unacked_events_, 0));
}

}  // namespace asyncfabric::verbs
