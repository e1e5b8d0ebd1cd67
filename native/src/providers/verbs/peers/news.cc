// news.cc: what the service thread reports: connections that carry or never will, ends of peers' connections, ports and devices that fail and
// come back. Under the engine lock.
#include <bit>
#include <utility>

#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {

void VerbsRail::take_news() {
  for (News& news : handover_->news()) {
    switch (news.kind) {
      case NewsKind::kReady: take_ready(news); break;
      case NewsKind::kGivenUp: take_given_up(*news.connection, news.status); break;
      case NewsKind::kIncoming: incoming_[news.qpn] = {.qp = news.qp, .id = news.id, .window = news.credits}; break;
      case NewsKind::kIncomingGone: {
        incoming_.erase(news.qpn);
        shut_out_.erase(news.qpn);
        Job job;
        job.kind = JobKind::kForgotten;
        job.qpn = news.qpn;
        handover_->ask(std::move(job));
        break;
      }
      case NewsKind::kReceives:
        if (queues_) queues_->receives->add(std::move(news.block));
        break;
      case NewsKind::kReceivesLow:
        if (!queues_) break;
        queues_->receives->refill(true);
        queues_->receives->rearm_limit();
        break;
      case NewsKind::kAbandoned: close(*news.connection, StatusCode::kPeerDead); break;
      case NewsKind::kPortDown: take_port_down(news.status); break;
      case NewsKind::kPortUp: take_port_up(); break;
      case NewsKind::kDeviceFailed: take_device_failed(news.status); break;
      case NewsKind::kDeviceOpen: take_device_open(news); break;
      case NewsKind::kPeerMoved: take_moved(*news.connection); break;
    }
  }
}

uint32_t VerbsRail::table_slot(const std::shared_ptr<Connection>& connection) {
  if (connection->slot != kNoSlot) return connection->slot;
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(table_.size()));
    table_.emplace_back();
    generations_.push_back(0);
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  table_[slot] = connection;
  return slot;
}

void VerbsRail::take_ready(News& news) {
  Connection& connection = *news.connection;
  if (connection.closed) return;  // its queue pairs go with the news
  connection.slot = table_slot(news.connection);
  for (size_t index = 0; index < kLanes; ++index) {
    if ((news.lanes >> index & 1) == 0) continue;
    Lane& lane = connection.lanes[index];
    pass_verdict(connection, lane, lane.broken);  // the peer lives, and nobody knows what it got
    if (connection.met) ++figures_.rebuilt_lanes;
    lane.pair = std::move(news.pairs[index]);
    lane.ring.resize(std::bit_ceil(lane.pair.sizes.sends));
    lane.head = lane.flushed = lane.tail = 0;
    lane.received = ~0ull;
    lane.generation = ++generations_[connection.slot];
    lane.state = LaneState::kReady;
    if (index != kSignalLane) continue;
    connection.messages_sent = connection.messages_taken = 0;
    connection.window = news.credits;
    by_credit_qpn_[lane.pair.qp->qp_num] = &connection;
    for (uint32_t i = 0; i < kCreditReceives; ++i) post_credit_receive(lane.pair.qp.get());
  }
  connection.met = true;
  connection.life = news.life;
  path_answers(connection);
  connection.waiting.insert(connection.waiting.begin(), connection.again.begin(), connection.again.end());
  connection.again.clear();
  if (!connection.waiting.empty() && !connection.listed) waiting_.push_back(&connection);
  connection.listed = !connection.waiting.empty();
}

void VerbsRail::take_given_up(Connection& connection, Status status) {
  if (connection.closed) return;
  RailPeer* handle = connection.abandoned.load(std::memory_order_acquire) ? nullptr : connection.handle;
  close(connection, status);
  if (handle == nullptr) return;
  RailEvent event;
  event.kind = RailEventKind::kPeerLost;
  event.status = status;
  event.peer = handle;
  events_.push({event});
}

void VerbsRail::take_port_down(Status status) {
  if (port_down_) return;
  port_down_ = true;
  pass_verdicts(status);
  RailEvent event;
  event.kind = RailEventKind::kRailDown;
  event.status = status;
  events_.push({event});
}

void VerbsRail::take_port_up() {
  if (!port_down_) return;  // some drivers report it twice
  port_down_ = false;
  for (const std::shared_ptr<Connection>& connection : table_)
    if (connection != nullptr) ask_path(*connection);
  RailEvent event;
  event.kind = RailEventKind::kRailUp;
  events_.push({event});
}

// What a failed device was given it will not report: its queue pairs go, which fences them, and each request ends by name at once. Messages are
// kept: they go out again when the device is open.
void VerbsRail::take_device_failed(Status status) {
  if (!queues_) return;
  Job job;
  job.kind = JobKind::kWreck;
  for (const std::shared_ptr<Connection>& connection : table_)
    if (connection != nullptr) leave_device(*connection, status);
  take_port_down(status);
  waiting_.clear();
  by_credit_qpn_.clear();
  incoming_.clear();
  shut_out_.clear();
  in_device_ = stale_ = 0;
  cancel_wait();
  if (unacked_events_ != 0) device_->library().ibv_ack_cq_events(queues_->cq.get(), std::exchange(unacked_events_, 0));
  for (const auto& block : queues_->receives->blocks()) old_blocks_.push_back(block);
  job.queues = std::move(queues_);
  handover_->ask(std::move(job));
}

void VerbsRail::leave_device(Connection& connection, Status status) {
  report_path(connection, true);
  connection.unproven = connection.listed = false;
  for (Lane& lane : connection.lanes) {
    lane.pair = {};
    lane.state = LaneState::kBuilding;
    for (; lane.flushed != lane.tail; ++lane.flushed) keep_message(connection, lane.at(lane.flushed));
    pass_verdict(connection, lane, status);
    end_records(lane, lane.tail, status);
  }
}

void VerbsRail::take_device_open(News& news) {
  queues_ = std::move(news.queues);
  address_.gid = news.address.gid;
  address_.lid = news.address.lid;
  address_.mtu = news.address.mtu;
  address_.qpn = news.address.qpn;
  address_.qkey = news.address.qkey;
  address_.life = news.address.life;
  openings_.store(news.address.life, std::memory_order_relaxed);
  (void)watch(queues_->channel->fd);
  port_down_ = false;
  RailEvent event;
  event.kind = RailEventKind::kRailUp;
  events_.push({event});
}

// What is under way to the peer's device of before will not be answered by it.
void VerbsRail::take_moved(Connection& connection) {
  if (connection.closed) return;
  report_path(connection, true);
  for (Lane& lane : connection.lanes)
    if (lane.state == LaneState::kReady) push_out(connection, lane);
}

}  // namespace asyncfabric::verbs
